//! Prepared transfers.

use multirail::{Op, PreparedTransfer};

use crate::abi::*;
use crate::arguments::{Entries, Input, Out, OutText};
use crate::failure::Failure;
use crate::handles::{PEERS, PREPARED, REGIONS, REMOTES};
use crate::list::{local, remote};
use crate::op::submitted;
use crate::transfer::{pages, selection};
use crate::transfer_options::{TransferOptions, read_options, write_options};

/// Posts a transfer with what the options change of this post.
fn post(prepared: &PreparedTransfer, options: Option<&TransferOptions>) -> Result<Op, Failure> {
    let Some(options) = options else { return Ok(prepared.post()?) };
    if options.says_more() {
        let why = "a post may change the imm or the notification alone; prepare the transfer with the other options";
        return Err(Failure::invalid(why));
    }
    match (options.imm(), options.notification()?) {
        (None, None) => Ok(prepared.post()?),
        (Some(imm), None) => Ok(prepared.post_with_imm(imm)?),
        (None, Some(bytes)) => Ok(prepared.post_and_notify(bytes)?),
        (Some(_), Some(_)) => {
            let why = "a post may change the imm or the notification, not both; prepare the transfer with one of them";
            Err(Failure::invalid(why))
        }
    }
}

entry_points! {
    fn mr_prepare_write_pages(
        peer: mr_peer,
        region: mr_region,
        pages: Input<mr_pages>,
        remote: mr_remote,
        remote_pages: Input<mr_pages>,
        count: usize,
        page_size: usize,
        options: Input<mr_transfer_options>,
        prepared: Out<mr_prepared>,
    ) {
        prepared.check("prepared")?;
        let (peer, region, remote) = (PEERS.find(peer)?, REGIONS.find(region)?, REMOTES.find(remote)?);
        let (from, to) = (self::pages(pages, count, "pages")?, self::pages(remote_pages, count, "remote_pages")?);
        let options = write_options(options)?;
        prepared.set(PREPARED.insert(peer.prepare_write_pages(&region, from, &remote, to, page_size, &options)?)?);
        Ok(MR_OK)
    }

    fn mr_prepare_read_pages(
        peer: mr_peer,
        region: mr_region,
        pages: Input<mr_pages>,
        remote: mr_remote,
        remote_pages: Input<mr_pages>,
        count: usize,
        page_size: usize,
        options: Input<mr_transfer_options>,
        prepared: Out<mr_prepared>,
    ) {
        prepared.check("prepared")?;
        let (peer, region, remote) = (PEERS.find(peer)?, REGIONS.find(region)?, REMOTES.find(remote)?);
        let (to, from) = (self::pages(pages, count, "pages")?, self::pages(remote_pages, count, "remote_pages")?);
        let options = read_options(options)?;
        prepared.set(PREPARED.insert(peer.prepare_read_pages(&region, to, &remote, from, page_size, &options)?)?);
        Ok(MR_OK)
    }

    fn mr_prepare_write_list(
        peer: mr_peer,
        local: mr_local_list,
        local_indices: Entries<u32>,
        remote: mr_remote_list,
        remote_indices: Entries<u32>,
        count: usize,
        options: Input<mr_transfer_options>,
        prepared: Out<mr_prepared>,
    ) {
        prepared.check("prepared")?;
        let (peer, options) = (PEERS.find(peer)?, write_options(options)?);
        let from = selection(&local_indices, count, "local_indices")?;
        let to = selection(&remote_indices, count, "remote_indices")?;
        let made = self::local(local, |local| {
            self::remote(remote, |remote| Ok(peer.prepare_write_list(local, from, remote, to, &options)?))
        });
        prepared.set(PREPARED.insert(made?)?);
        Ok(MR_OK)
    }

    fn mr_prepare_read_list(
        peer: mr_peer,
        local: mr_local_list,
        local_indices: Entries<u32>,
        remote: mr_remote_list,
        remote_indices: Entries<u32>,
        count: usize,
        options: Input<mr_transfer_options>,
        prepared: Out<mr_prepared>,
    ) {
        prepared.check("prepared")?;
        let (peer, options) = (PEERS.find(peer)?, read_options(options)?);
        let to = selection(&local_indices, count, "local_indices")?;
        let from = selection(&remote_indices, count, "remote_indices")?;
        let made = self::local(local, |local| {
            self::remote(remote, |remote| Ok(peer.prepare_read_list(local, to, remote, from, &options)?))
        });
        prepared.set(PREPARED.insert(made?)?);
        Ok(MR_OK)
    }

    fn mr_prepared_post(prepared: mr_prepared, options: Input<mr_transfer_options>, op: Out<mr_op>) {
        let options = TransferOptions::read(options)?;
        submitted(op, post(&*PREPARED.find(prepared)?, options.as_ref())?)
    }

    fn mr_prepared_bytes(prepared: mr_prepared, bytes: Out<u64>) {
        bytes.check("bytes")?;
        bytes.set(PREPARED.find(prepared)?.bytes());
        Ok(MR_OK)
    }

    fn mr_prepared_explain(prepared: mr_prepared, buf: OutText, len: usize, needed: Out<usize>) {
        let parts = PREPARED.find(prepared)?.explain()?;
        let parts: Vec<String> = parts.iter().map(ToString::to_string).collect();
        buf.write(len, needed, &parts.join("\n"))
    }

    fn mr_prepared_release(prepared: mr_prepared) {
        drop(PREPARED.take(prepared)?);
        Ok(MR_OK)
    }
}

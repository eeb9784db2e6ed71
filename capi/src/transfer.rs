//! Transfers: writes and reads of ranges, pages and lists, and their explanations.

use std::ops::Range;

use multirail::{Pages, Selection};

use crate::abi::*;
use crate::arguments::{Entries, Input, Out, OutText, page_indices};
use crate::failure::Failure;
use crate::handles::{PEERS, REGIONS, REMOTES};
use crate::list::{local, remote};
use crate::op::submitted;
use crate::transfer_options::{read_options, write_options};

/// A range of bytes. One that goes beyond all addresses is beyond every region.
fn range(offset: usize, length: usize) -> Range<usize> {
    offset..offset.saturating_add(length)
}

/// The pages of one side of a transfer.
pub fn pages(given: Input<mr_pages>, count: usize, what: &str) -> Result<Pages, Failure> {
    let given = given.read(what)?;
    let mut pages = match page_indices(&given, count, what)? {
        Some(indices) => Pages::new(indices),
        None => {
            let count =
                u32::try_from(count).map_err(|_| Failure::invalid(format!("{count} pages are too many")))?;
            Pages::new(0..count)
        }
    };
    if given.stride != 0 {
        pages = pages.stride(given.stride);
    }
    Ok(pages.offset(given.offset))
}

/// The entries of one side of a transfer between lists. `what` names the parameter in errors.
pub fn selection<'a>(indices: &'a Entries<u32>, count: usize, what: &str) -> Result<Selection<'a>, Failure> {
    if !indices.is_null() {
        return Ok(indices.read(count, what)?.into());
    }
    let end = u32::try_from(count).map_err(|_| Failure::invalid(format!("{count} entries are too many")))?;
    Ok((0..end).into())
}

entry_points! {
    fn mr_write(
        peer: mr_peer,
        region: mr_region,
        offset: usize,
        remote: mr_remote,
        remote_offset: usize,
        length: usize,
        options: Input<mr_transfer_options>,
        op: Out<mr_op>,
    ) {
        let (peer, region, remote) = (PEERS.find(peer)?, REGIONS.find(region)?, REMOTES.find(remote)?);
        let range = range(offset, length);
        let written = match options.is_null() {
            true => peer.write(&region, range, &remote, remote_offset),
            false => peer.write_with(&region, range, &remote, remote_offset, &write_options(options)?),
        };
        submitted(op, written?)
    }

    fn mr_read(
        peer: mr_peer,
        region: mr_region,
        offset: usize,
        remote: mr_remote,
        remote_offset: usize,
        length: usize,
        options: Input<mr_transfer_options>,
        op: Out<mr_op>,
    ) {
        let (peer, region, remote) = (PEERS.find(peer)?, REGIONS.find(region)?, REMOTES.find(remote)?);
        let options = read_options(options)?;
        submitted(op, peer.read_with(&region, range(offset, length), &remote, remote_offset, &options)?)
    }

    fn mr_write_pages(
        peer: mr_peer,
        region: mr_region,
        pages: Input<mr_pages>,
        remote: mr_remote,
        remote_pages: Input<mr_pages>,
        count: usize,
        page_size: usize,
        options: Input<mr_transfer_options>,
        op: Out<mr_op>,
    ) {
        let (peer, region, remote) = (PEERS.find(peer)?, REGIONS.find(region)?, REMOTES.find(remote)?);
        let (from, to) = (self::pages(pages, count, "pages")?, self::pages(remote_pages, count, "remote_pages")?);
        let options = write_options(options)?;
        submitted(op, peer.write_pages_with(&region, from, &remote, to, page_size, &options)?)
    }

    fn mr_read_pages(
        peer: mr_peer,
        region: mr_region,
        pages: Input<mr_pages>,
        remote: mr_remote,
        remote_pages: Input<mr_pages>,
        count: usize,
        page_size: usize,
        options: Input<mr_transfer_options>,
        op: Out<mr_op>,
    ) {
        let (peer, region, remote) = (PEERS.find(peer)?, REGIONS.find(region)?, REMOTES.find(remote)?);
        let (to, from) = (self::pages(pages, count, "pages")?, self::pages(remote_pages, count, "remote_pages")?);
        let options = read_options(options)?;
        submitted(op, peer.read_pages_with(&region, to, &remote, from, page_size, &options)?)
    }

    fn mr_write_list(
        peer: mr_peer,
        local: mr_local_list,
        local_indices: Entries<u32>,
        remote: mr_remote_list,
        remote_indices: Entries<u32>,
        count: usize,
        options: Input<mr_transfer_options>,
        op: Out<mr_op>,
    ) {
        let (peer, options) = (PEERS.find(peer)?, write_options(options)?);
        let from = selection(&local_indices, count, "local_indices")?;
        let to = selection(&remote_indices, count, "remote_indices")?;
        let written = self::local(local, |local| {
            self::remote(remote, |remote| Ok(peer.write_list(local, from, remote, to, &options)?))
        });
        submitted(op, written?)
    }

    fn mr_read_list(
        peer: mr_peer,
        local: mr_local_list,
        local_indices: Entries<u32>,
        remote: mr_remote_list,
        remote_indices: Entries<u32>,
        count: usize,
        options: Input<mr_transfer_options>,
        op: Out<mr_op>,
    ) {
        let (peer, options) = (PEERS.find(peer)?, read_options(options)?);
        let to = selection(&local_indices, count, "local_indices")?;
        let from = selection(&remote_indices, count, "remote_indices")?;
        let read = self::local(local, |local| {
            self::remote(remote, |remote| Ok(peer.read_list(local, to, remote, from, &options)?))
        });
        submitted(op, read?)
    }

    fn mr_explain_write(
        peer: mr_peer,
        region: mr_region,
        offset: usize,
        remote: mr_remote,
        remote_offset: usize,
        length: usize,
        options: Input<mr_transfer_options>,
        buf: OutText,
        len: usize,
        needed: Out<usize>,
    ) {
        let (peer, region, remote) = (PEERS.find(peer)?, REGIONS.find(region)?, REMOTES.find(remote)?);
        let options = write_options(options)?;
        let explained = peer.explain_write(&region, range(offset, length), &remote, remote_offset, &options)?;
        buf.write(len, needed, &explained.to_string())
    }

    fn mr_explain_read(
        peer: mr_peer,
        region: mr_region,
        offset: usize,
        remote: mr_remote,
        remote_offset: usize,
        length: usize,
        options: Input<mr_transfer_options>,
        buf: OutText,
        len: usize,
        needed: Out<usize>,
    ) {
        let (peer, region, remote) = (PEERS.find(peer)?, REGIONS.find(region)?, REMOTES.find(remote)?);
        let options = read_options(options)?;
        let explained = peer.explain_read(&region, range(offset, length), &remote, remote_offset, &options)?;
        buf.write(len, needed, &explained.to_string())
    }
}

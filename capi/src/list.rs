//! Lists of pieces of regions.

use std::sync::{PoisonError, RwLock};

use multirail::{LocalList, Region, RemoteList, RemoteRegion, Result as LibraryResult};

use crate::abi::*;
use crate::arguments::{Entries, Out};
use crate::failure::Failure;
use crate::handles::{LOCAL_LISTS, REGIONS, REMOTE_LISTS, REMOTES};
use crate::slab::{Guard, Slab};

/// Calls `read` with a local list.
pub fn local<T>(
    list: mr_local_list,
    read: impl FnOnce(&LocalList) -> Result<T, Failure>,
) -> Result<T, Failure> {
    read(&LOCAL_LISTS.find(list)?.read().unwrap_or_else(PoisonError::into_inner))
}

/// Calls `read` with a remote list.
pub fn remote<T>(
    list: mr_remote_list,
    read: impl FnOnce(&RemoteList) -> Result<T, Failure>,
) -> Result<T, Failure> {
    read(&REMOTE_LISTS.find(list)?.read().unwrap_or_else(PoisonError::into_inner))
}

/// Appends entries: the handle of a region, an offset and a length each. Neighbours often lie in one region, which is
/// looked up once for all of them.
fn append<R: Send + Sync>(
    regions: &'static Slab<R>,
    entries: impl Iterator<Item = (u64, u64, u64)>,
    mut push: impl FnMut(&R, usize, usize) -> LibraryResult<()>,
) -> Result<(), Failure> {
    let mut last: Option<(u64, Guard<R>)> = None;
    for (at, (handle, offset, length)) in entries.enumerate() {
        let region = match last.take_if(|(known, _)| *known == handle) {
            Some((_, region)) => region,
            None => regions.find(handle).map_err(|why| why.within(format!("entry {at}")))?,
        };
        let pushed = push(&region, offset as usize, length as usize);
        pushed.map_err(|why| Failure::from(why).within(format!("entry {at}")))?;
        last = Some((handle, region));
    }
    Ok(())
}

fn append_local(list: &mut LocalList, entries: &[mr_local_entry]) -> Result<(), Failure> {
    let entries = entries.iter().map(|entry| (entry.region, entry.offset, entry.length));
    append(&REGIONS, entries, |region: &Region, offset, length| list.push(region, offset, length))
}

fn append_remote(list: &mut RemoteList, entries: &[mr_remote_entry]) -> Result<(), Failure> {
    let entries = entries.iter().map(|entry| (entry.remote, entry.offset, entry.length));
    append(&REMOTES, entries, |region: &RemoteRegion, offset, length| list.push(region, offset, length))
}

entry_points! {
    fn mr_local_list_new(entries: Entries<mr_local_entry>, count: usize, list: Out<mr_local_list>) {
        list.check("list")?;
        let mut new = LocalList::new();
        append_local(&mut new, entries.read(count, "entries")?)?;
        list.set(LOCAL_LISTS.insert(RwLock::new(new))?);
        Ok(MR_OK)
    }

    fn mr_remote_list_new(entries: Entries<mr_remote_entry>, count: usize, list: Out<mr_remote_list>) {
        list.check("list")?;
        let mut new = RemoteList::new();
        append_remote(&mut new, entries.read(count, "entries")?)?;
        list.set(REMOTE_LISTS.insert(RwLock::new(new))?);
        Ok(MR_OK)
    }

    fn mr_local_list_append(list: mr_local_list, entries: Entries<mr_local_entry>, count: usize) {
        let list = LOCAL_LISTS.find(list)?;
        let entries = entries.read(count, "entries")?;
        append_local(&mut list.write().unwrap_or_else(PoisonError::into_inner), entries)?;
        Ok(MR_OK)
    }

    fn mr_remote_list_append(list: mr_remote_list, entries: Entries<mr_remote_entry>, count: usize) {
        let list = REMOTE_LISTS.find(list)?;
        let entries = entries.read(count, "entries")?;
        append_remote(&mut list.write().unwrap_or_else(PoisonError::into_inner), entries)?;
        Ok(MR_OK)
    }

    fn mr_local_list_append_strided(
        list: mr_local_list,
        region: mr_region,
        offset: u64,
        length: u64,
        count: u32,
        stride: u64,
    ) {
        let (list, region) = (LOCAL_LISTS.find(list)?, REGIONS.find(region)?);
        let mut list = list.write().unwrap_or_else(PoisonError::into_inner);
        list.push_strided(&region, offset as usize, length as usize, count, stride as usize)?;
        Ok(MR_OK)
    }

    fn mr_remote_list_append_strided(
        list: mr_remote_list,
        remote: mr_remote,
        offset: u64,
        length: u64,
        count: u32,
        stride: u64,
    ) {
        let (list, region) = (REMOTE_LISTS.find(list)?, REMOTES.find(remote)?);
        let mut list = list.write().unwrap_or_else(PoisonError::into_inner);
        list.push_strided(&region, offset as usize, length as usize, count, stride as usize)?;
        Ok(MR_OK)
    }

    fn mr_local_list_len(list: mr_local_list, count: Out<usize>) {
        count.check("count")?;
        count.set(local(list, |list| Ok(list.len()))?);
        Ok(MR_OK)
    }

    fn mr_remote_list_len(list: mr_remote_list, count: Out<usize>) {
        count.check("count")?;
        count.set(remote(list, |list| Ok(list.len()))?);
        Ok(MR_OK)
    }

    fn mr_local_list_release(list: mr_local_list) {
        drop(LOCAL_LISTS.take(list)?);
        Ok(MR_OK)
    }

    fn mr_remote_list_release(list: mr_remote_list) {
        drop(REMOTE_LISTS.take(list)?);
        Ok(MR_OK)
    }
}

//! Catalogues: regions are found by address on both sides, and imported when they are.

use transport_core::spi::Operations;
use transport_core::{Access, Catalogue, ErrorKind, LocalList, RemoteList, WriteOptions};

use crate::check::{TestResult, TrialFailure, ensure, ensure_eq, ensure_err, within};
use crate::checked_region::{CheckedRegion, FULL_ACCESS};
use crate::process::{HelperProcess, LIMIT, worker_fabric};
use crate::sim_harness::SimPair;
use crate::trial::{Trial, TrialContext};

pub(super) const TRIALS: &[Trial] = &[
    Trial::new("catalogue::finds_by_address", finds_by_address).needs(Operations::WRITE),
    Trial::new("catalogue::is_refused_where_an_import_is", refused),
    Trial::new("catalogue::between_processes", between_processes).needs(Operations::READ).process(),
];

const LEN: usize = 4096;

/// Regions, each with content of its own.
fn regions(pair: &SimPair, count: u64) -> TestResult<Vec<CheckedRegion>> {
    (0..count).map(|seed| CheckedRegion::new(&pair.b, LEN, FULL_ACCESS, seed)).collect()
}

fn catalogue_of(regions: &[CheckedRegion]) -> TestResult<Catalogue> {
    Ok(Catalogue::new(regions.iter().map(|checked| checked.region.clone()))?)
}

fn finds_by_address(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let mut theirs = regions(&pair, 200)?;
    let catalogue = catalogue_of(&theirs)?;
    let imported = pair.to_b.import_catalogue(&catalogue.to_bytes())?;
    ensure_eq("the regions", (imported.len(), imported.describe(7)), (200, Some((LEN, FULL_ACCESS))))?;
    let src = CheckedRegion::new(&pair.a, LEN, Access::LOCAL, context.seed)?;
    // One transfer to places that are known by their addresses alone.
    let (mut from, mut to) = (LocalList::new(), RemoteList::new());
    for (number, checked) in theirs.iter_mut().enumerate() {
        let at = number * 16;
        let address = checked.region.as_ptr() as u64 + at as u64;
        let (own, offset) = catalogue.find(address, 16)?;
        ensure_eq("the owner finds it", (own.as_ptr(), offset), (checked.region.as_ptr(), at))?;
        let (region, offset) = imported.find(address, 16)?;
        to.push(region, offset, 16)?;
        from.push(&src.region, at, 16)?;
        checked.expect_from(at, &src, at..at + 16);
    }
    pair.sim.done(pair.to_b.write_list(&from, .., &to, .., &WriteOptions::new())?)?;
    theirs.iter().try_for_each(|checked| checked.check("a region that was found"))?;
    // The last byte is found, and not one behind it unless the next region begins there.
    let last = theirs[5].region.as_ptr() as u64 + LEN as u64 - 1;
    ensure_eq("the last byte", imported.find(last, 1)?.1, LEN - 1)?;
    for result in [catalogue.find(last, LEN + 1).map(drop), imported.find(last, LEN + 1).map(drop)] {
        let error = ensure_err("beyond a region", result, &[ErrorKind::NotFound])?;
        ensure(error.context().contains("200 regions"), error.to_string())?;
    }
    ensure_err("a number", imported.region(200).map(drop), &[ErrorKind::NotFound]).map(drop)
}

fn refused(context: &TrialContext) -> TestResult {
    let pair = SimPair::new(context)?;
    let theirs = regions(&pair, 3)?;
    let bytes = catalogue_of(&theirs)?.to_bytes();
    let imported = pair.to_b.import_catalogue(&bytes)?;
    pair.sim.output("a revocation", theirs[1].region.revoke()?)??;
    let address = |number: usize| theirs[number].region.as_ptr() as u64;
    imported.find(address(0), LEN)?;
    let kinds = [ErrorKind::Revoked, ErrorKind::RemoteAccess, ErrorKind::NotFound];
    if let Ok((region, _)) = imported.find(address(1), LEN) {
        let src = CheckedRegion::new(&pair.a, 64, Access::LOCAL, context.seed)?;
        ensure_err("a write", pair.to_b.write(&src.region, 0..64, region, 0), &kinds)?;
    }
    // The catalogue of another opening.
    let other = SimPair::new(context)?;
    let mixed =
        [&theirs[0].region, &CheckedRegion::new(&other.b, LEN, FULL_ACCESS, 9)?.region].map(Clone::clone);
    ensure_err("two fabrics", Catalogue::new(mixed).map(drop), &[ErrorKind::InvalidRequest])?;
    let foreign = other.to_b.import_catalogue(&bytes)?;
    let found = foreign.find(address(0), LEN).map(drop);
    if pair.b.incarnation() != other.b.incarnation() {
        ensure_err("another opening", found, &[ErrorKind::Revoked])?;
    }
    for bytes in [&bytes[..bytes.len() - 1], &bytes[..3], b"mrC\x07"] {
        ensure_err(
            "damaged",
            pair.to_b.import_catalogue(bytes).map(drop),
            &[ErrorKind::Protocol, ErrorKind::Version],
        )?;
    }
    Ok(())
}

fn between_processes(context: &TrialContext) -> TestResult {
    let fabric = worker_fabric(context)?;
    let (mut helper, peer) = HelperProcess::spawn_connected(context, &fabric)?;
    helper.command("alloc-catalogue kv 500 8192")?;
    let catalogue = within(LIMIT, "a catalogue", peer.catalogue("kv"))??;
    ensure_eq("its regions", catalogue.len(), 500)?;
    let mut near = CheckedRegion::new(&fabric, 8192, Access::LOCAL, 1)?;
    for number in [0, 77, 499] {
        let address = helper.command(&format!("address kv {number}"))?;
        let address: u64 =
            address.parse().map_err(|_| TrialFailure::new(format!("no address: {address}")))?;
        let (region, offset) = catalogue.find(address + 100, 8000)?;
        ensure_eq("the offset", offset, 100)?;
        peer.read(&near.region, 0..8000, region, offset)?.wait(LIMIT)?;
        // The helper fills each region with the content of its number.
        let far = CheckedRegion::new(&fabric, 8192, Access::LOCAL, number)?;
        near.expect_from(0, &far, 100..8100);
        near.check("a region that was found by address")?;
    }
    Ok(())
}

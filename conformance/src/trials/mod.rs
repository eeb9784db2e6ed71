//! The trials, one file per noun.

mod barrier;
mod cancel;
mod catalogue;
mod cleanup;
mod close;
mod cross_process;
mod deadline;
mod death;
mod drain;
mod explain;
mod fair;
mod fault;
mod forgery;
mod frozen;
mod futures;
mod grant;
mod groups;
mod imm;
mod lists;
mod message;
mod mirror;
mod notifications;
mod order;
mod pages;
mod paths;
mod peers;
mod pool;
mod prepared;
mod queue;
mod rails;
mod read;
mod receipts;
mod reconnect;
mod refusal;
mod revoke;
mod routing;
mod scatter;
mod tenant;
mod trigger;
mod warm;
mod window;
mod write;

use crate::trial::Trial;

/// All trials.
pub fn trials() -> impl Iterator<Item = &'static Trial> {
    const ALL: &[&[Trial]] = &[
        write::TRIALS,
        read::TRIALS,
        pages::TRIALS,
        catalogue::TRIALS,
        paths::TRIALS,
        prepared::TRIALS,
        imm::TRIALS,
        lists::TRIALS,
        mirror::TRIALS,
        notifications::TRIALS,
        trigger::TRIALS,
        scatter::TRIALS,
        barrier::TRIALS,
        warm::TRIALS,
        explain::TRIALS,
        message::TRIALS,
        pool::TRIALS,
        futures::TRIALS,
        refusal::TRIALS,
        forgery::TRIALS,
        revoke::TRIALS,
        cancel::TRIALS,
        drain::TRIALS,
        deadline::TRIALS,
        queue::TRIALS,
        order::TRIALS,
        fair::TRIALS,
        grant::TRIALS,
        groups::TRIALS,
        window::TRIALS,
        routing::TRIALS,
        tenant::TRIALS,
        rails::TRIALS,
        fault::TRIALS,
        peers::TRIALS,
        cross_process::TRIALS,
        receipts::TRIALS,
        reconnect::TRIALS,
        death::TRIALS,
        frozen::TRIALS,
        cleanup::TRIALS,
        close::TRIALS,
    ];
    ALL.iter().copied().flatten()
}

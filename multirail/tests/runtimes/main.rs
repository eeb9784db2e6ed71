//! Every public future under every kind of executor, and without one.
//!
//! `scenario` awaits each future of the library once; `executors` has it run by many,
//! among them the one in `strict`, which loses what a future would lose; `blocking`
//! does without, and `lossless` drops waits half way. `sendable` is checked by the
//! compiler. `select` and `flood` show that a dropped operation lets no late byte land,
//! `between` that it holds between two processes, and `blocked` that a runtime which
//! stands still loses no peer. `device` opens fabrics, `page` is memory that knows what
//! it should contain, `child` is the other process.

mod between;
mod blocked;
mod blocking;
mod child;
mod device;
mod executors;
mod flood;
mod lossless;
mod page;
mod scenario;
mod select;
mod sendable;
mod served;
mod strict;

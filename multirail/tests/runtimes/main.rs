//! Every public future on every kind of executor, and without one.
//!
//! `scenario` awaits each future of the library once. `executors` runs it on many executors,
//! among them the one in `strict`, which shows lost wakeups. `blocking` uses no executor, and
//! `lossless` drops waits before they complete. The compiler checks `sendable`. `select` and
//! `flood` show that no late byte of a dropped operation lands, and `between` shows it between
//! two processes. It also shows that a blocked runtime loses no peer. `device` opens fabrics and
//! makes pages with an expected content, and `child` is the other process.

mod between;
mod blocking;
mod child;
mod device;
mod executors;
mod flood;
mod lossless;
mod scenario;
mod select;
mod sendable;
mod strict;

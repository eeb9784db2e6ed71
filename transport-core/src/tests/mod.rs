//! Tests over whole fabrics.

mod control;
pub(crate) mod wakers;

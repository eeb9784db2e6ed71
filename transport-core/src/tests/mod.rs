//! Tests over whole fabrics.

mod control;

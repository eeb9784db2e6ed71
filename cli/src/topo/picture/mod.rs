//! The rail groups as an SVG picture without external files.
//!
//! [`Picture`](layout::Picture) is the layout. It has one [`Panel`](panel::Panel) per group. `draw` turns the layout
//! into [`svg`] elements.

mod draw;
mod layout;
mod panel;
mod svg;

use topology::{Machine, RailGroup};

/// The picture of a machine called `name`.
pub fn svg(name: &str, machine: &Machine, groups: &[RailGroup]) -> String {
    draw::draw(&layout::Picture::new(name, machine, groups))
}

#[cfg(test)]
mod tests;

//! The rail groups as a picture: SVG that needs nothing beside it.
//!
//! [`Picture`](layout::Picture) says where everything is, made of [`Panel`](panel::Panel)s, one per
//! group; `draw` puts that into [`svg`] elements.

mod draw;
mod frame;
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

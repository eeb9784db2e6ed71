//! Colours.

/// A group's colour, and that of text on it.
///
/// Paul Tol's muted scheme (SRON/EPS/TN/09-002): told apart by the colour-blind. The
/// order keeps neighbours unlike each other; after nine they come again, so that every group has
/// its number too.
pub fn group(number: usize) -> (&'static str, &'static str) {
    const COLOURS: [(&str, &str); 9] = [
        ("#332288", "#ffffff"),
        ("#44aa99", INK),
        ("#cc6677", INK),
        ("#117733", "#ffffff"),
        ("#88ccee", INK),
        ("#882255", "#ffffff"),
        ("#ddcc77", INK),
        ("#aa4499", "#ffffff"),
        ("#999933", INK),
    ];
    COLOURS[number % COLOURS.len()]
}

/// Text.
pub const INK: &str = "#1b1f24";
/// Lesser text.
pub const GREY: &str = "#57606a";
/// Borders of what belongs to no group.
pub const LINE: &str = "#afb8c1";
/// The ground of a NUMA node.
pub const GROUND: &str = "#f3f5f7";
/// A GPU.
pub const GPU: &str = "#dfe3e8";
/// The page, and boxes on a ground.
pub const PAPER: &str = "#ffffff";

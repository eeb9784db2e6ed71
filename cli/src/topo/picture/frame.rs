//! Rectangles, and the number of columns of a grid.

/// A rectangle, in pixels at 100 % zoom.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PixelRect {
    /// The left edge.
    pub x: f64,
    /// The upper edge.
    pub y: f64,
    /// The width.
    pub width: f64,
    /// The height.
    pub height: f64,
}

impl PixelRect {
    /// A rectangle with this corner and size.
    pub fn new(x: f64, y: f64, width: f64, height: f64) -> Self {
        Self { x, y, width, height }
    }

    /// The right edge.
    pub fn right(&self) -> f64 {
        self.x + self.width
    }

    /// The lower edge.
    pub fn bottom(&self) -> f64 {
        self.y + self.height
    }

    /// The vertical center.
    pub fn middle(&self) -> f64 {
        self.y + self.height / 2.0
    }

    /// The horizontal center.
    pub fn center(&self) -> f64 {
        self.x + self.width / 2.0
    }
}

/// The number of columns of a grid with `count` cells and about `aspect` times as many columns as rows.
pub fn columns(count: usize, aspect: f64) -> usize {
    let rows = (count as f64 / aspect).sqrt().round().max(1.0) as usize;
    count.div_ceil(rows).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_are_wide_and_full() {
        let of = |aspect| [0, 1, 2, 4, 8, 16].map(|count| columns(count, aspect));
        assert_eq!(of(1.0), [1, 1, 2, 2, 3, 4]);
        assert_eq!(of(2.0), [1, 1, 2, 4, 4, 6]);
    }
}

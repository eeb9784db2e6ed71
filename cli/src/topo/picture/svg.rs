//! SVG elements as text. This module escapes every attribute and text.

use std::fmt::Write as _;

use super::panel::PixelRect;

/// A list of SVG elements.
#[derive(Default)]
pub struct Svg {
    body: String,
}

/// The style of a text.
#[derive(Debug, Clone, Copy)]
pub struct Style {
    /// The size in pixels.
    pub size: f64,
    /// True for bold text.
    pub is_bold: bool,
    /// `start`, `middle` or `end`.
    pub anchor: &'static str,
    /// The colour.
    pub fill: &'static str,
}

/// The attributes of one element.
type Attributes<'a> = &'a [(&'a str, &'a str)];

impl Svg {
    /// Adds a rectangle with round corners.
    pub fn rectangle(&mut self, frame: &PixelRect, radius: f64, attributes: Attributes<'_>) {
        let PixelRect { x, y, width, height } = frame;
        let _ = write!(
            self.body,
            r#"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" rx="{radius:.1}""#
        );
        self.close(attributes);
    }

    /// Adds a line between two points.
    pub fn line(&mut self, from: (f64, f64), to: (f64, f64), attributes: Attributes<'_>) {
        let ((x1, y1), (x2, y2)) = (from, to);
        let _ = write!(self.body, r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}""#);
        self.close(attributes);
    }

    /// Adds text that is vertically centered at `y`.
    pub fn text(&mut self, x: f64, y: f64, style: Style, text: &str) {
        self.rotated(x, y, style, text, "");
    }

    /// Adds text that reads upwards.
    pub fn upwards(&mut self, x: f64, y: f64, style: Style, text: &str) {
        self.rotated(x, y, style, text, &format!(r#" transform="rotate(-90 {x:.1} {y:.1})""#));
    }

    fn rotated(&mut self, x: f64, y: f64, style: Style, text: &str, transform: &str) {
        let Style { size, is_bold, anchor, fill } = style;
        let weight = if is_bold { r#" font-weight="bold""# } else { "" };
        // Not every program supports dominant-baseline. About a third of the size is half the height of a capital.
        let _ = writeln!(
            self.body,
            r#"<text x="{x:.1}" y="{y:.1}" dy="{:.1}" font-size="{size}"{weight} text-anchor="{anchor}" fill="{fill}"{transform}>{}</text>"#,
            size * 0.35,
            escaped(text)
        );
    }

    fn close(&mut self, attributes: Attributes<'_>) {
        for (name, value) in attributes {
            let _ = write!(self.body, r#" {name}="{}""#, escaped(value));
        }
        self.body.push_str("/>\n");
    }

    /// Adds a line through several points.
    pub fn polyline(&mut self, points: &[(f64, f64)], attributes: Attributes<'_>) {
        self.body.push_str(r#"<polyline points=""#);
        for (x, y) in points {
            let _ = write!(self.body, "{x:.1},{y:.1} ");
        }
        self.body.push_str(r#"" fill="none""#);
        self.close(attributes);
    }

    /// The document with this size, and a title for screen readers.
    pub fn document(self, width: f64, height: f64, title: &str) -> String {
        format!("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n{}", self.element(width, height, title))
    }

    /// The picture as an element of a page.
    pub fn element(self, width: f64, height: f64, title: &str) -> String {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
             viewBox=\"0 0 {width:.0} {height:.0}\" font-family=\"sans-serif\" role=\"img\">\n\
             <title>{}</title>\n{}</svg>\n",
            escaped(title),
            self.body
        )
    }
}

/// Escapes text for XML. Characters that XML 1.0 forbids (section 2.2) become U+FFFD.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&apos;"),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// An upper bound of the width of a text, in pixels.
///
/// It is based on DejaVu Sans, one of the wider fonts: the widest letter of each class in its `hmtx` table. Bold is an
/// eighth wider.
pub fn width(text: &str, size: f64, is_bold: bool) -> f64 {
    let one = |c: char| match c {
        'i' | 'j' | 'l' | 'f' | 't' | 'r' | 'I' | 'J' | ' ' | '.' | ',' | ':' | '/' | '-' | '(' | ')' => 0.42,
        'm' | 'w' | 'M' | 'W' | '%' | '@' | '&' | '#' | '+' | '<' | '=' | '>' | '^' | '~' => 1.0,
        c if c.is_ascii_uppercase() => 0.79,
        c if c.is_ascii() => 0.64,
        _ => 1.0,
    };
    text.chars().map(one).sum::<f64>() * size * if is_bold { 1.125 } else { 1.0 }
}

/// Cuts a text so that it fits `room`, with an ellipsis if it was cut.
pub fn fitted(text: &str, size: f64, is_bold: bool, room: f64) -> String {
    if width(text, size, is_bold) <= room {
        return text.to_owned();
    }
    let mut cut = String::new();
    for c in text.chars() {
        cut.push(c);
        if width(&cut, size, is_bold) + size > room {
            cut.pop();
            break;
        }
    }
    cut.push('…');
    cut
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_special_characters_are_escaped() {
        let text = escaped("<a href=\"x\">&'\u{0}\u{1b}");
        assert_eq!(text, "&lt;a href=&quot;x&quot;&gt;&amp;&apos;\u{fffd}\u{fffd}");
    }

    #[test]
    fn text_fits() {
        assert_eq!(fitted("rdmap79s0", 12.0, true, 90.0), "rdmap79s0");
        let cut = fitted(&"x".repeat(1000), 12.0, false, 90.0);
        assert!(cut.ends_with('…') && width(&cut, 12.0, false) <= 90.0, "{cut}");
        assert_eq!(fitted("long", 12.0, false, 0.0), "…");
    }
}

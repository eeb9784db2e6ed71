//! Plots as SVG: lines over an axis, and bars.

use crate::topo::picture::PixelRect;
use crate::topo::picture::svg::{Style, Svg, fitted};

const WIDTH: f64 = 1160.0;
const HEIGHT: f64 = 320.0;
/// What the plot itself takes of the picture: the rest is for the axes' labels and the legend.
const AREA: PixelRect = PixelRect { x: 70.0, y: 36.0, width: 1060.0, height: 230.0 };
const BAR: f64 = 26.0;

const TEXT: &str = "#1f2933";
const GRID: &str = "#d9dfe5";
/// Colours that people with any colour vision tell apart (Okabe and Ito).
const COLOURS: [&str; 8] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a6a00", "#444444"];

/// How values lie on an axis.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scale {
    /// From zero to the next tick.
    Linear,
    /// From zero to the largest value.
    Time,
    /// By powers of this base.
    Powers(f64),
}

impl Scale {
    /// Whether the axis has a place for zero.
    fn has_zero(self) -> bool {
        !matches!(self, Self::Powers(_))
    }
}

/// A line of a plot: its name, and its points.
pub struct Series {
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

/// Lines over an axis.
pub struct LinePlot<'a> {
    pub title: &'a str,
    /// The labels of the axes.
    pub labels: [&'a str; 2],
    pub scales: [Scale; 2],
    pub series: Vec<Series>,
    /// Moments to mark on the horizontal axis, with names.
    pub marks: Vec<(f64, String)>,
    /// The text of a value on the horizontal axis.
    pub name: fn(f64) -> String,
}

/// The range of an axis, with its ticks.
struct Axis {
    scale: Scale,
    low: f64,
    high: f64,
    ticks: Vec<f64>,
}

impl Axis {
    fn new(scale: Scale, values: impl Iterator<Item = f64>) -> Self {
        let shown = values.filter(|value| value.is_finite() && (scale.has_zero() || *value > 0.0));
        let (least, most) =
            shown.fold((f64::INFINITY, 0.0_f64), |(least, most), value| (least.min(value), most.max(value)));
        match scale {
            Scale::Linear | Scale::Time => {
                let step = nice_step(most.max(1e-9) / 5.0);
                let count = (most.max(1e-9) / step).ceil().max(1.0);
                let high = if scale == Scale::Time { most.max(1e-9) } else { step * count };
                let ticks = (0..=count as usize).map(|at| at as f64 * step);
                Self { scale, low: 0.0, high, ticks: ticks.filter(|tick| *tick <= high).collect() }
            }
            Scale::Powers(base) => {
                let least = if least.is_finite() { least } else { 1.0 };
                let low = (least.log(base) + 1e-9).floor();
                let high = (most.max(least).log(base) - 1e-9).ceil().max(low + 1.0);
                let every = ((high - low) / 11.0).ceil().max(1.0) as usize;
                let powers = (low as i32..=high as i32).step_by(every);
                let ticks = powers.map(|power| base.powi(power)).collect();
                Self { scale, low: base.powf(low), high: base.powf(high), ticks }
            }
        }
    }

    /// The share of the axis that lies before `value`.
    fn share(&self, value: f64) -> f64 {
        match self.scale {
            Scale::Linear | Scale::Time => (value - self.low) / (self.high - self.low),
            Scale::Powers(_) => (value / self.low).ln() / (self.high / self.low).ln(),
        }
    }
}

impl LinePlot<'_> {
    /// The plot as an SVG element.
    pub fn draw(&self) -> String {
        let mut svg = Svg::default();
        let all = || self.series.iter().flat_map(|series| &series.points);
        let horizontal = Axis::new(self.scales[0], all().map(|point| point.0));
        let vertical = Axis::new(self.scales[1], all().map(|point| point.1));
        let x = |value: f64| AREA.x + horizontal.share(value).clamp(0.0, 1.0) * AREA.width;
        let y = |value: f64| AREA.y + (1.0 - vertical.share(value).clamp(0.0, 1.0)) * AREA.height;
        let bottom = AREA.y + AREA.height;
        for tick in &vertical.ticks {
            svg.line((AREA.x, y(*tick)), (AREA.x + AREA.width, y(*tick)), &[("stroke", GRID)]);
            svg.text(AREA.x - 8.0, y(*tick), style(12.0, "end"), &number(*tick));
        }
        for tick in &horizontal.ticks {
            svg.line((x(*tick), AREA.y), (x(*tick), bottom), &[("stroke", GRID)]);
            svg.text(x(*tick), bottom + 16.0, style(12.0, "middle"), &(self.name)(*tick));
        }
        svg.text(AREA.x + AREA.width / 2.0, HEIGHT - 14.0, style(13.0, "middle"), self.labels[0]);
        svg.upwards(16.0, AREA.y + AREA.height / 2.0, style(13.0, "middle"), self.labels[1]);
        // The names of marks that are near to each other are below each other.
        let mut free = [AREA.x; 6];
        for (moment, name) in &self.marks {
            let x = x(*moment);
            svg.line((x, AREA.y), (x, bottom), &[("stroke", TEXT), ("stroke-dasharray", "4 4")]);
            let Some(row) = free.iter().position(|free| *free <= x) else { continue };
            free[row] = x + 10.0 + 8.0 * name.chars().count() as f64;
            svg.text(x + 4.0, AREA.y + 8.0 + 13.0 * row as f64, style(11.0, "start"), name);
        }
        let mut legend = AREA.x;
        for (series, colour) in self.series.iter().zip(COLOURS.iter().cycle()) {
            let is_shown = |(at, value): &&(f64, f64)| {
                (self.scales[0].has_zero() || *at > 0.0) && (self.scales[1].has_zero() || *value > 0.0)
            };
            let points: Vec<_> =
                series.points.iter().filter(is_shown).map(|point| (x(point.0), y(point.1))).collect();
            svg.polyline(&points, &[("stroke", colour), ("stroke-width", "2"), ("stroke-linejoin", "round")]);
            if points.len() <= 32 {
                for (x, y) in points {
                    let dot = PixelRect { x: x - 3.0, y: y - 3.0, width: 6.0, height: 6.0 };
                    svg.rectangle(&dot, 3.0, &[("fill", colour)]);
                }
            }
            svg.line((legend, 16.0), (legend + 22.0, 16.0), &[("stroke", colour), ("stroke-width", "3")]);
            let name = fitted(&series.name, 13.0, false, 190.0);
            svg.text(legend + 28.0, 16.0, style(13.0, "start"), &name);
            legend += 50.0 + 8.0 * name.chars().count() as f64;
        }
        svg.element(WIDTH, HEIGHT, self.title)
    }
}

/// Horizontal bars, each with its name and the text of its value.
pub fn bars(title: &str, bars: &[(String, f64, String)]) -> String {
    let mut svg = Svg::default();
    let most = bars.iter().map(|bar| bar.1).fold(f64::MIN_POSITIVE, f64::max);
    for (at, (name, value, text)) in bars.iter().enumerate() {
        let y = 6.0 + at as f64 * BAR;
        let width = (value / most * 760.0).max(1.0);
        svg.text(160.0, y + 10.0, style(13.0, "end"), &fitted(name, 13.0, false, 150.0));
        svg.rectangle(&PixelRect { x: 170.0, y, width, height: 20.0 }, 2.0, &[("fill", COLOURS[0])]);
        svg.text(180.0 + width, y + 10.0, style(13.0, "start"), text);
    }
    svg.element(WIDTH, 12.0 + bars.len() as f64 * BAR, title)
}

fn style(size: f64, anchor: &'static str) -> Style {
    Style { size, is_bold: false, anchor, fill: TEXT }
}

/// The next of 1, 2, 5, 10, ... that is not smaller.
fn nice_step(least: f64) -> f64 {
    let power = 10_f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|step| step * power)
        .find(|step| *step >= least * 0.999)
        .unwrap_or(power)
}

/// A number with as many digits as it needs.
pub fn number(number: f64) -> String {
    match number {
        0.0 => "0".to_owned(),
        n if n >= 10_000.0 => format!("{:.0}k", n / 1000.0),
        n if n >= 100.0 => format!("{n:.0}"),
        n => {
            let text = format!("{n:.4}");
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(scales: [Scale; 2], points: Vec<(f64, f64)>) -> String {
        let series = vec![Series { name: "a < b".into(), points }];
        LinePlot {
            title: "t",
            labels: ["x", "y"],
            scales,
            series,
            marks: vec![(1.0, "m".into())],
            name: number,
        }
        .draw()
    }

    #[test]
    fn any_points_give_a_well_formed_picture() {
        for scales in [[Scale::Time, Scale::Linear], [Scale::Powers(2.0), Scale::Powers(10.0)]] {
            for points in [vec![], vec![(0.0, 0.0)], vec![(1.0, f64::NAN)], vec![(8.0, 1e-4), (4e6, 1e5)]] {
                let picture = plot(scales, points.clone());
                let document = roxmltree::Document::parse(&picture).expect("XML");
                let numbers = document.descendants().flat_map(|node| node.attributes());
                for attribute in numbers.filter(|a| ["x1", "y1", "x", "y", "points"].contains(&a.name())) {
                    assert!(!attribute.value().contains("inf"), "{points:?}: {picture}");
                }
            }
        }
        roxmltree::Document::parse(&bars("b", &[("a&b".into(), 0.0, "0 %".into())])).expect("XML");
    }

    #[test]
    fn axes_hold_all_values() {
        let linear = Axis::new(Scale::Linear, [3.0, 17.0].into_iter());
        assert_eq!((linear.low, linear.high, linear.ticks.len()), (0.0, 20.0, 5));
        let powers = Axis::new(Scale::Powers(2.0), [8.0, 4096.0].into_iter());
        assert_eq!((powers.low, powers.high), (8.0, 4096.0));
        assert!((powers.share(8.0), powers.share(4096.0)) == (0.0, 1.0));
    }
}

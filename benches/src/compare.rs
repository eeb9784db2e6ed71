//! Compares a figure of our program with that of a program in C.
//!
//! Both programs run in turn, so that other work of the machine slows both alike.

use std::path::PathBuf;
use std::process::Command;

use crate::BenchResult;

/// The figures of several runs of two programs.
pub struct Compared {
    ours: Vec<f64>,
    theirs: Vec<f64>,
    ratios: Vec<f64>,
}

impl Compared {
    /// Calls each function `pairs` times. They take turns in going first, in case the second call is easier.
    pub fn of(
        pairs: usize,
        mut ours: impl FnMut() -> BenchResult<f64>,
        mut theirs: impl FnMut() -> BenchResult<f64>,
    ) -> BenchResult<Self> {
        let mut this = Self { ours: Vec::new(), theirs: Vec::new(), ratios: Vec::new() };
        for pair in 0..pairs {
            let (a, b) = match pair % 2 {
                0 => (ours()?, theirs()?),
                _ => {
                    let b = theirs()?;
                    (ours()?, b)
                }
            };
            this.ours.push(a);
            this.theirs.push(b);
            this.ratios.push(a / b);
        }
        Ok(this)
    }

    /// The median of our runs.
    pub fn ours(&self) -> f64 {
        median(&self.ours)
    }

    /// The median of the other program's runs.
    pub fn theirs(&self) -> f64 {
        median(&self.theirs)
    }

    /// The median of the pairs' ratios.
    pub fn ratio(&self) -> f64 {
        median(&self.ratios)
    }

    /// The lower bound of the median ratio, with a confidence of 95 %.
    pub fn at_least(&self) -> f64 {
        lower_bound(&self.ratios)
    }
}

/// Runs a program and reads a figure from the line of JSON that it prints.
pub fn read(mut command: Command, figure: &str) -> BenchResult<f64> {
    let output = command.output().map_err(|why| format!("{command:?} does not start: {why}"))?;
    let value = find(&String::from_utf8_lossy(&output.stdout), figure).filter(|_| output.status.success());
    let words = || String::from_utf8_lossy(&output.stderr).into_owned();
    Ok(value.ok_or_else(|| format!("{command:?} measured nothing: {}", words()))?)
}

/// Finds a figure in a line of JSON.
pub fn find(line: &str, figure: &str) -> Option<f64> {
    let rest = line.split(&format!("\"{figure}\":")).nth(1)?;
    rest.split([',', '}']).next()?.trim().parse().ok()
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values
}

/// The median: the middle value, or the mean of the two middle values.
pub fn median(values: &[f64]) -> f64 {
    let values = sorted(values);
    let middle = values.len() / 2;
    match values.len() % 2 {
        0 => (values[middle - 1] + values[middle]) / 2.0,
        _ => values[middle],
    }
}

/// The lower bound of the median, with a confidence of 95 %: the order statistic with at most 5 % of a fair coin's
/// binomial below it (the sign test, which assumes no distribution). Returns 0 for fewer than five values.
fn lower_bound(values: &[f64]) -> f64 {
    let values = sorted(values);
    let n = values.len() as i32;
    let (mut below, mut chance, mut index) = (0.0, 0.5_f64.powi(n), None);
    for k in 0..n {
        below += chance;
        if below > 0.05 {
            break;
        }
        index = Some(k as usize);
        chance *= f64::from(n - k) / f64::from(k + 1);
    }
    index.map_or(0.0, |index| values[index])
}

/// Compiles `benches/NAME.c`, an upper limit of our own loop, beside the running program. The program links with
/// `library`, which Debian's package `package` has.
pub fn compile(name: &str, library: &str, package: &str) -> BenchResult<PathBuf> {
    let source = format!("{}/{name}.c", env!("CARGO_MANIFEST_DIR"));
    let stem = name.rsplit('/').next().unwrap_or(name);
    let program = std::env::current_exe()?.with_file_name(stem);
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-O2", "-o"]).arg(&program).args([&source, &format!("-l{library}")]);
    let advice = format!("install a C compiler and headers (Debian: gcc, {package})");
    match cc.status() {
        Ok(status) if status.success() => Ok(program),
        Ok(status) => Err(format!("cc ends with {status}: {advice}").into()),
        Err(why) => Err(format!("cc does not start ({why}): {advice}").into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_those_of_the_sign_test() {
        let values = |n: usize| (1..=n).map(|value| value as f64).collect::<Vec<_>>();
        // Tables of the sign test: of 15 values the 4th, of 20 the 6th; 5 are the fewest.
        for (n, want) in [(4, 0.0), (5, 1.0), (15, 4.0), (20, 6.0)] {
            assert_eq!(lower_bound(&values(n)), want, "{n}");
        }
        assert_eq!((median(&values(15)), median(&values(4))), (8.0, 2.5));
    }

    #[test]
    fn sides_take_turns() {
        let order = std::cell::RefCell::new(String::new());
        let side = |name: char, figure: f64| {
            order.borrow_mut().push(name);
            Ok(figure)
        };
        let compared = Compared::of(3, || side('a', 3.0), || side('b', 2.0)).expect("no side fails");
        assert_eq!(*order.borrow(), "abbaab");
        assert_eq!((compared.ours(), compared.theirs(), compared.ratio()), (3.0, 2.0, 1.5));
    }
}

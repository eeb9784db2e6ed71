//! `multirail top`: a live view of a running process, over its admin socket.

mod rates;
mod sampler;
mod view;

use std::io::{IsTerminal, stdout};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use crate::admin_client::{AdminClient, Sample};
use crate::failure::{CommandFailure, CommandResult};
use crate::{output, units};
use sampler::Sampler;
use view::{Step, TopView};

/// The longest wait for a key. A new sample is shown after this time at the latest.
const TICK: Duration = Duration::from_millis(100);

/// The keys and the cost, for `--help`.
pub const KEYS: &str = "\
Keys: q quits, Tab and the arrows to the left and right go to the next and the previous table, the arrows up and down, \
Page Up, Page Down, Home and End move in it. The last lines have the whole sentence of the selected operation.

Each look is a dump of the process: its workers list their operations, which takes about a microsecond for each of them.";

/// The exit codes.
pub const EXIT: &str = "Exit code: 0 if you quit or the process has ended, 1 if the process cannot be asked (stderr has the \
    reason), 2 if the arguments are invalid.";

#[derive(clap::Args)]
pub struct TopArguments {
    /// The admin socket of the process
    #[arg(long, value_name = "PATH")]
    admin: PathBuf,

    /// The time between two looks at the process, 100ms to 30s
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    interval: Duration,

    /// Print one frame as plain text of 80 columns, with the rates of one interval
    #[arg(long)]
    once: bool,

    /// How long to wait for the process's answer
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = units::duration)]
    timeout: Duration,
}

/// Shows the process until the user quits or the process ends.
pub fn run(arguments: &TopArguments) -> CommandResult {
    let mut client = AdminClient::connect(&arguments.admin, arguments.timeout)?;
    let mut view = TopView::new(client.dump()?, arguments.interval);
    if arguments.once {
        std::thread::sleep(arguments.interval);
        view.show(client.dump()?);
        return output::text(&view.text(80));
    }
    if !stdout().is_terminal() {
        return Err(CommandFailure::new("stdout is no terminal; --once prints one frame as text"));
    }
    let ended = arguments.watch(client, &mut view)?;
    match ended {
        None => Ok(()),
        Some(failure) if arguments.has_ended() => {
            output::print_text(&format!("{} has ended: {}", view.process(), failure.message()))
        }
        Some(failure) => Err(failure),
    }
}

impl TopArguments {
    /// Draws until the user quits, or until the process cannot be asked any more: then returns why.
    fn watch(&self, client: AdminClient, view: &mut TopView) -> CommandResult<Option<CommandFailure>> {
        let stopped = take_signals()?;
        let failed = |error| CommandFailure::new(format!("cannot use the terminal: {error}"));
        let sampler = Sampler::start(client, self.interval)?;
        let mut terminal = ratatui::try_init().map_err(failed)?;
        let ended = loop {
            match sampler.take() {
                Some(Ok(sample)) => view.show(sample),
                Some(Err(failure)) => break Ok(Some(failure)),
                None => {}
            }
            if let Err(error) = terminal.draw(|frame| view.draw(frame)) {
                break Err(failed(error));
            }
            match next_key() {
                Ok(Some(key)) if is_quit(key) => break Ok(None),
                Ok(Some(key)) => step(view, key.code),
                Ok(None) => {}
                Err(error) => break Err(failed(error)),
            }
            if stopped.load(Ordering::Relaxed) {
                break Ok(None);
            }
        };
        ratatui::restore();
        ended
    }

    /// Whether nobody listens at the socket any more.
    fn has_ended(&self) -> bool {
        AdminClient::connect(&self.admin, self.timeout).is_err()
    }
}

/// The next key that is pressed within a tick.
fn next_key() -> std::io::Result<Option<KeyEvent>> {
    if !event::poll(TICK)? {
        return Ok(None);
    }
    match event::read()? {
        Event::Key(key) if key.kind != KeyEventKind::Release => Ok(Some(key)),
        _ => Ok(None),
    }
}

fn is_quit(key: KeyEvent) -> bool {
    let is_control_c = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    is_control_c || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc)
}

fn step(view: &mut TopView, key: KeyCode) {
    let step = match key {
        KeyCode::Tab | KeyCode::Right => Step::NextTable,
        KeyCode::BackTab | KeyCode::Left => Step::PreviousTable,
        KeyCode::Up => Step::Rows(-1),
        KeyCode::Down => Step::Rows(1),
        KeyCode::PageUp => Step::Rows(-10),
        KeyCode::PageDown => Step::Rows(10),
        KeyCode::Home => Step::Rows(isize::MIN),
        KeyCode::End => Step::Rows(isize::MAX),
        _ => return,
    };
    view.step(step);
}

/// A flag that signals to end set, so that the terminal is restored before the process ends.
#[cfg(unix)]
fn take_signals() -> CommandResult<Arc<AtomicBool>> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let stopped = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stopped))
            .map_err(|error| CommandFailure::new(format!("cannot handle signals: {error}")))?;
    }
    Ok(stopped)
}

#[cfg(not(unix))]
fn take_signals() -> CommandResult<Arc<AtomicBool>> {
    Ok(Arc::default())
}

/// Parses `--interval`.
fn interval(text: &str) -> Result<Duration, String> {
    let interval = units::duration(text)?;
    match (Duration::from_millis(100)..=Duration::from_secs(30)).contains(&interval) {
        true => Ok(interval),
        false => Err("the interval must be between 100ms and 30s".to_owned()),
    }
}

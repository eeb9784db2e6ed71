//! The parent's handle on a helper process.

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};

use limit::Limit;
use rustix::process::{Pid, Signal, kill_process};
use transport_core::{Fabric, Peer};

use super::role::{SEED, SUBJECT, VARIANT};
use super::{Census, LIMIT};
use crate::check::{Failure, Verdict, within};
use crate::trial::Context;

/// A helper process; killed when dropped.
pub(crate) struct Child {
    process: std::process::Child,
    orders: ChildStdin,
    answers: Receiver<String>,
}

impl Child {
    /// Starts one with an open fabric of the same subject and variant.
    #[track_caller]
    pub(crate) fn spawn(context: &Context) -> Verdict<Self> {
        let mut child = Self::spawn_idle(context)?;
        child.ask("open")?;
        Ok(child)
    }

    /// Starts one that has opened nothing.
    #[track_caller]
    pub(crate) fn spawn_idle(context: &Context) -> Verdict<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .env(SUBJECT, context.subject.name())
            .env(VARIANT, context.variant.name())
            .env(SEED, (context.seed + 500).to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let missing = || Failure::new("a helper without pipes");
        let orders = process.stdin.take().ok_or_else(missing)?;
        let output = process.stdout.take().ok_or_else(missing)?;
        let (tell, answers) = mpsc::channel();
        std::thread::spawn(move || {
            BufReader::new(output).lines().map_while(Result::ok).try_for_each(|line| tell.send(line))
        });
        Ok(Self { process, orders, answers })
    }

    /// Gives an order and waits for the answer, which must be good.
    #[track_caller]
    pub(crate) fn ask(&mut self, order: &str) -> Verdict<String> {
        self.tell(order)?;
        self.answer(order)
    }

    /// Gives an order that must be refused, with an error of that kind.
    #[track_caller]
    pub(crate) fn refuses(&mut self, order: &str, kinds: &[&str]) -> Verdict {
        self.tell(order)?;
        let answer = self.line(order)?;
        let kind = answer.strip_prefix("err ").and_then(|rest| rest.split(' ').next());
        match kind {
            Some(kind) if kinds.contains(&kind) => Ok(()),
            _ => Err(Failure::new(format!("helper, {order}: {answer:?}, want one of {kinds:?}"))),
        }
    }

    /// Gives an order.
    #[track_caller]
    pub(crate) fn tell(&mut self, order: &str) -> Verdict {
        Ok(writeln!(self.orders, "{order}")?)
    }

    /// Waits for the answer to an order given before.
    #[track_caller]
    pub(crate) fn answer(&mut self, order: &str) -> Verdict<String> {
        let line = self.line(order)?;
        match line.strip_prefix("ok") {
            Some(answer) => Ok(answer.trim().into()),
            None => Err(Failure::new(format!("helper, {order}: {line}"))),
        }
    }

    #[track_caller]
    fn line(&mut self, order: &str) -> Verdict<String> {
        let waited = Limit::of(LIMIT).receive(&self.answers);
        waited.map_err(|_| Failure::new(format!("helper, {order}: no answer within {LIMIT:?}")))
    }

    /// Starts one with a fabric, which listens, and connects `fabric` to it.
    #[track_caller]
    pub(crate) fn met(context: &Context, fabric: &Fabric) -> Verdict<(Self, Peer)> {
        let mut child = Self::spawn(context)?;
        let address = child.ask("listen")?;
        let peer = child.meets(fabric, &address)?;
        Ok((child, peer))
    }

    /// The bytes of the descriptor of the helper's region `name`.
    #[track_caller]
    pub(crate) fn descriptor(&mut self, name: &str) -> Verdict<Vec<u8>> {
        let hex = self.ask(&format!("descriptor {name}"))?;
        let bytes = (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16));
        bytes.collect::<Result<_, _>>().map_err(|why| Failure::new(format!("no descriptor: {why}")))
    }

    /// Connects `fabric` to `address`, by which the helper's listener is reached.
    #[track_caller]
    pub(crate) fn meets(&mut self, fabric: &Fabric, address: &str) -> Verdict<Peer> {
        self.tell("accept")?;
        let peer = within(LIMIT, "a connection", fabric.connect(address))??;
        self.answer("accept")?;
        Ok(peer)
    }

    /// What it holds now.
    #[track_caller]
    pub(crate) fn census(&mut self) -> Verdict<Census> {
        self.ask("census")?.parse().map_err(Failure::new)
    }

    /// Sends it a signal.
    #[track_caller]
    pub(crate) fn signal(&self, signal: Signal) -> Verdict {
        let id = i32::try_from(self.process.id()).ok().and_then(Pid::from_raw);
        let id = id.ok_or_else(|| Failure::new("a process without a number"))?;
        kill_process(id, signal).map_err(|error| std::io::Error::from(error).into())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

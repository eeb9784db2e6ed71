//! The server of a bench: holds the target regions and compares the received bytes.

use std::time::Duration;

use multirail::{Access, Fabric, Peer, Region, wait};

use super::layout::PageLayout;
use super::load::{BenchLoad, OpKind};
use super::protocol::{COMPARE, ClientMessage, PROTOCOL, ServerMessage, VERSION, region_name};
use super::{content, verification};
use crate::common::ObserveOptions;
use crate::connection::{until_closed, wait_until_closed};
use crate::failure::{CommandFailure, CommandResult};
use crate::units::{self, Size};
use crate::wire::{self, MESSAGE_BYTES, MessageReceiver, MessageSender, RECEIVES, RESPONSE_LIMIT};
use crate::{Common, output};

/// How long a live client may be silent, longer than the longest `--duration`.
const MAX_CLIENT_SILENCE: Duration = Duration::from_secs(25 * 3600);

/// The total bytes of all receives, when messages are measured.
const RECEIVE_BYTES: usize = 32 << 20;

#[derive(clap::Args)]
pub struct ServerArguments {
    /// Where to listen; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:7410", value_name = "ADDRESS")]
    listen: String,

    #[command(flatten)]
    observed: ObserveOptions,

    /// Give up if no client has connected within this time
    #[arg(long, value_parser = units::duration, value_name = "TIME", hide = true)]
    wait: Option<Duration>,
}

/// Serves one client.
pub fn run(common: &Common, arguments: &ServerArguments) -> CommandResult {
    let fabric = common.open_observed(&arguments.observed)?;
    let listener = crate::connection::listen(&fabric, &arguments.listen)?;
    let address = listener.local_addr();
    match common.json {
        true => output::json(&serde_json::json!({ "listening": address }))?,
        false => output::line(&format!("listening on {address}; run: multirail bench client {address}"))?,
    }
    let limit = arguments.wait.unwrap_or(Duration::MAX);
    let peer = wait(listener.accept(), limit)
        .map_err(|_| CommandFailure::new(format!("no client connected within {} s", limit.as_secs())))??;
    serve_one(&fabric, &peer, |load| {
        let (kind, size, pages) = (load.kind.name(), Size(load.size), load.pages);
        match common.json {
            true => output::json(&serde_json::json!({ "ready": kind, "size": load.size, "pages": pages })),
            false => output::line(&format!("ready for {kind} of {pages} pages of {size}")),
        }
    })
    .inspect_err(|_| common.dumps.after_failure(&fabric))
    .map_err(|failure| failure.context("the bench client did not finish"))
}

/// Serves `peer` until the end of its session. `announce` is called for every prepared load.
pub fn serve_one(
    fabric: &Fabric,
    peer: &Peer,
    announce: impl Fn(&BenchLoad) -> CommandResult,
) -> CommandResult {
    let incoming = MessageReceiver::new(fabric.recv_pool(RECEIVES, MESSAGE_BYTES)?, peer);
    let mut target =
        BenchTarget { fabric, peer, incoming, outgoing: MessageSender::new(fabric, peer)?, work: None };
    target.outgoing.send(&ServerMessage::Hello { protocol: PROTOCOL, version: VERSION })?;
    loop {
        let answer = match target.receive()? {
            ClientMessage::Prepare(load) => match target.prepare(load) {
                Ok(work) => {
                    let ready = announce(&work.load);
                    target.work = Some(work);
                    ready.map(|()| ServerMessage::Ready)?
                }
                Err(refusal) => ServerMessage::Refused(refusal.message().to_owned()),
            },
            ClientMessage::Overwrite => match &target.work {
                Some(work) => {
                    content::overwrite(&work.regions)?;
                    ServerMessage::Ready
                }
                None => ServerMessage::Refused("no load is prepared".to_owned()),
            },
            ClientMessage::Check { operations } => ServerMessage::Checked(target.check(operations)?),
            ClientMessage::Bye => {
                // The client may have disconnected before the send completes here.
                let _ = target.outgoing.send(&ServerMessage::Bye);
                wait_until_closed(peer);
                return Ok(());
            }
        };
        target.outgoing.send(&answer)?;
    }
}

struct BenchTarget<'a> {
    fabric: &'a Fabric,
    peer: &'a Peer,
    incoming: MessageReceiver,
    outgoing: MessageSender,
    work: Option<PreparedLoad>,
}

struct PreparedLoad {
    load: BenchLoad,
    regions: Vec<Region>,
    layout: PageLayout,
    /// The number of received messages.
    messages: u64,
    /// The first mismatch of a message.
    wrong: Option<String>,
}

impl BenchTarget<'_> {
    fn prepare(&mut self, load: BenchLoad) -> CommandResult<PreparedLoad> {
        load.check().map_err(CommandFailure::new)?;
        if let Some(work) = self.work.take() {
            (0..work.regions.len()).for_each(|number| self.fabric.unpublish(&region_name(number)));
        }
        let measured = load.kind == OpKind::Send;
        let (layout, access) = (PageLayout::new(&load), Access::REMOTE_WRITE | Access::REMOTE_READ);
        // Messages arrive in receives.
        let regions = if measured { Vec::new() } else { layout.alloc(load.remote(), self.fabric, access)? };
        match load.kind.is_read() {
            true => content::fill(&regions, &load)?,
            false => content::overwrite(&regions)?,
        }
        for (number, region) in regions.iter().enumerate() {
            self.fabric.publish(&region_name(number), region)?;
        }
        if measured {
            let each = (load.size as usize).max(MESSAGE_BYTES);
            let count = (RECEIVE_BYTES / each).clamp(2, 1024);
            self.incoming.replace(self.fabric.recv_pool(count, each)?);
        }
        Ok(PreparedLoad { load, regions, layout, messages: 0, wrong: None })
    }

    /// Waits for the next message of the protocol. Counts measured messages meanwhile.
    fn receive(&mut self) -> CommandResult<ClientMessage> {
        loop {
            let message = self.incoming.next(MAX_CLIENT_SILENCE)?;
            match message.imm() {
                None => return wire::decode(&message.to_vec()),
                Some(imm) => self.count(imm, &message)?,
            }
        }
    }

    fn count(&mut self, imm: u32, message: &multirail::Message) -> CommandResult {
        let work = self
            .work
            .as_mut()
            .ok_or_else(|| CommandFailure::new("a measured message arrived before a measurement"))?;
        work.messages += 1;
        if imm & COMPARE != 0 && work.wrong.is_none() {
            let index = imm & !COMPARE;
            let right = match work.layout.sources.get(index as usize) {
                Some(&source) => content::is_page(&message.to_vec(), &work.load, source),
                None => false,
            };
            if !right {
                work.wrong = Some(format!("message {index} has wrong content"));
            }
        }
        Ok(())
    }

    /// Compares all received bytes. Waits for outstanding messages and imms.
    fn check(&mut self, operations: u64) -> CommandResult<Result<(), String>> {
        let Some(work) = &self.work else { return Ok(Err("no load is prepared".to_owned())) };
        match work.load.kind {
            OpKind::Send => self.check_messages(operations),
            OpKind::WriteImm => self.check_imms(operations),
            kind if kind.is_read() => Ok(Ok(())),
            _ => Ok(bytes(work)),
        }
    }

    fn check_messages(&mut self, operations: u64) -> CommandResult<Result<(), String>> {
        while let Some(work) = &self.work
            && work.messages < operations
        {
            let message = self.incoming.next(RESPONSE_LIMIT)?;
            match message.imm() {
                Some(imm) => self.count(imm, &message)?,
                None => return Err(CommandFailure::new("the client sent a message before the response")),
            }
        }
        let Some(work) = &self.work else { return Ok(Err("no load is prepared".to_owned())) };
        Ok(match &work.wrong {
            Some(wrong) => Err(wrong.clone()),
            None if work.messages == operations => Ok(()),
            None => Err(format!("{} messages arrived, {operations} were sent", work.messages)),
        })
    }

    fn check_imms(&self, operations: u64) -> CommandResult<Result<(), String>> {
        let Some(work) = &self.work else { return Ok(Err("no load is prepared".to_owned())) };
        let counter = self.peer.imm(work.load.imm);
        let arrived = wait(until_closed(self.peer, counter.expect(operations)), RESPONSE_LIMIT);
        match arrived {
            Ok(Err(error)) => return Err(error.into()),
            Ok(Ok(())) if counter.count() == operations => {}
            _ => return Ok(Err(format!("{} imms arrived, {operations} were sent", counter.count()))),
        }
        Ok(bytes(work))
    }
}

fn bytes(work: &PreparedLoad) -> Result<(), String> {
    match verification::first_mismatch(&work.regions, &work.load) {
        Ok(None) => Ok(()),
        Ok(Some(offset)) => {
            Err(format!("the server's memory differs from the sent bytes near byte {offset}"))
        }
        Err(why) => Err(format!("cannot compare the server's memory: {why}")),
    }
}

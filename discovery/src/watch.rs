//! Watching the members of a directory.

use std::collections::{BTreeMap, HashSet};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_core::Stream;
use multirail::{Error, Result};
use tokio::sync::mpsc;
use tokio::task::unconstrained;
use tokio::time::{Instant, sleep, sleep_until};

use crate::backoff::Backoff;
use crate::runtime::{AbortOnDrop, Runtime};
use crate::store::within_limit;
use crate::{Changes, Listing, MAX_MEMBERS, Member, Store};

/// The most events that wait for their reader. The task waits then, and loses none: it compares the members with what
/// it has told.
const BACKLOG: usize = 1024;
/// The least time between two lists: changes that come together are listed together.
const LEAST_INTERVAL: Duration = Duration::from_millis(20);
/// How much longer than two leases a missing member is kept after an outage. Thousands of requests that nobody waits
/// for any more may reach a server that comes back, before those of its members.
const GRACE: Duration = Duration::from_secs(5);
/// The pause before a watch that failed begins again.
const RESTART_DELAY: Duration = Duration::from_millis(50);
/// The pause after a list, in multiples of the time that it took.
const REST: u32 = 4;

/// What a watch tells.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Event {
    /// A member has joined, or was there when the watch began.
    Joined(Member),
    /// A member was restarted, as its incarnation says, or its addresses or attributes are others.
    Changed {
        /// The member as it is.
        member: Member,
        /// The member as it was.
        before: Member,
    },
    /// A member has left, or its lease has ended.
    Left(Member),
    /// The directory does not answer. The last known members stay members. The next event comes when it answers again.
    Outage(Error),
    /// The events so far give the members as the directory lists them: after the first list, and after an outage.
    Synced,
}

/// The changes of a directory's members, as a [`Stream`] that does not end. It begins with a `Joined` of each member
/// and `Synced`. Dropping it ends the watch.
///
/// While the directory does not answer, the last known members stay members. When it answers again, the watch compares
/// them with the new list and tells the differences. A member that is missing then has two leases and 5 s to join again
/// before it is told to have left: a store that was restarted may have lost every entry, while the processes are well.
/// Other breaks do not begin that time anew, and do not count towards it.
pub struct Watch {
    events: mpsc::Receiver<Event>,
    _task: AbortOnDrop<()>,
    /// None if the owner, a task of the thread itself, has another.
    _runtime: Option<Arc<Runtime>>,
}

impl Watch {
    /// The watch for a task of the thread of the directories, which must not keep that thread alive.
    pub(crate) fn for_task(mut self) -> Self {
        self._runtime = None;
        self
    }

    /// The next event. Cancel-safe; needs no particular runtime.
    pub async fn next(&mut self) -> Event {
        match self.events.recv().await {
            Some(event) => event,
            // The task ends with the watch alone.
            None => std::future::pending().await,
        }
    }
}

impl Stream for Watch {
    type Item = Event;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Event>> {
        self.events.poll_recv(context)
    }
}

/// Lists the store when it may have changed, and sends the differences.
pub(crate) struct WatchTask {
    store: Arc<dyn Store>,
    events: mpsc::Sender<Event>,
    view: View,
    /// The entries that were warned of.
    warned: HashSet<(String, String)>,
}

impl WatchTask {
    pub fn start(store: Arc<dyn Store>, runtime: Arc<Runtime>) -> Watch {
        let (sender, events) = mpsc::channel(BACKLOG);
        let task = Self { store, events: sender, view: View::default(), warned: HashSet::new() };
        Watch { events, _task: AbortOnDrop(runtime.spawn(task.run())), _runtime: Some(runtime) }
    }

    async fn run(mut self) {
        let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(1));
        let (mut is_out, mut lost) = (false, None);
        loop {
            let error = match self.begin().await {
                Ok((changes, listing)) => {
                    backoff.reset();
                    if let Some(lost) = lost {
                        self.view.interrupted(lost, Instant::now());
                    }
                    self.apply(listing).await;
                    if std::mem::take(&mut is_out) || lost.is_none() {
                        self.send(Event::Synced).await;
                    }
                    let error = self.follow(changes).await;
                    lost = Some(Instant::now());
                    error
                }
                Err(error) => {
                    if !std::mem::replace(&mut is_out, true) {
                        tracing::warn!(directory = self.store.url(), %error, "the directory does not answer; its members stay as they are");
                        self.send(Event::Outage(error)).await;
                    }
                    sleep(backoff.next()).await;
                    continue;
                }
            };
            tracing::debug!(directory = self.store.url(), %error, "the watch begins again");
            sleep(RESTART_DELAY).await;
        }
    }

    /// Begins to listen for changes, then lists.
    async fn begin(&mut self) -> Result<(Box<dyn Changes>, Listing)> {
        let changes = within_limit(self.store.url(), "watch", self.store.changes()).await?;
        Ok((changes, self.list().await?))
    }

    async fn list(&mut self) -> Result<Listing> {
        let listing = within_limit(self.store.url(), "watch", self.store.list()).await?;
        // An entry stays as it is for many lists.
        let refused: HashSet<_> = listing.refused().iter().cloned().collect();
        for (key, why) in refused.difference(&self.warned) {
            tracing::warn!(directory = self.store.url(), entry = ?key, "this side skips an entry of the directory: {why}");
        }
        self.warned = refused;
        Ok(listing)
    }

    /// Lists after each change, until the store fails.
    async fn follow(&mut self, mut changes: Box<dyn Changes>) -> Error {
        let interval = self.store.poll_interval();
        loop {
            let poll = Instant::now() + interval;
            let due = self.view.due().map_or(poll, |due| due.min(poll));
            let changed = tokio::select! {
                changed = changes.next() => changed,
                () = sleep_until(due) => Ok(()),
            };
            if let Err(error) = changed.and_then(|()| take_ready(&mut *changes)) {
                return error;
            }
            let begun = Instant::now();
            let listed = self.list().await;
            // Without the time for which the reader lets this side wait.
            let rest = LEAST_INTERVAL.max(begun.elapsed() * REST);
            match listed {
                Ok(listing) => self.apply(listing).await,
                Err(error) => return error,
            }
            sleep(rest).await;
        }
    }

    async fn apply(&mut self, listing: Listing) {
        for event in self.view.update(listing.into_members(), Instant::now()) {
            self.send(event).await;
        }
    }

    async fn send(&self, event: Event) {
        // Fails only when the watch is dropped, which ends the task.
        let _ = self.events.send(event).await;
    }
}

/// Takes the messages that have come: one list is for all of them.
fn take_ready(changes: &mut dyn Changes) -> Result<()> {
    let mut context = Context::from_waker(Waker::noop());
    for _ in 0..MAX_MEMBERS {
        // Dropping what waits loses nothing. The list follows, whatever comes meanwhile.
        match pin!(unconstrained(changes.next())).poll(&mut context) {
            Poll::Ready(taken) => taken?,
            Poll::Pending => break,
        }
    }
    Ok(())
}

/// The members as they were told.
#[derive(Default)]
struct View {
    members: BTreeMap<String, Member>,
    /// The missing members that are kept, and until when.
    missing: BTreeMap<String, Instant>,
    /// When the store answered again after an interruption.
    interrupted: Option<Instant>,
}

impl View {
    /// Notes that the store answers again. Nobody could join again while it did not, so that the graces are longer by
    /// that.
    fn interrupted(&mut self, lost: Instant, now: Instant) {
        let away = now.saturating_duration_since(lost);
        self.missing.values_mut().for_each(|until| *until += away);
        self.interrupted = Some(now);
    }

    /// When the next missing member is told to have left.
    fn due(&self) -> Option<Instant> {
        self.missing.values().min().copied()
    }

    /// Takes a new list. Returns the differences: first who has left.
    fn update(&mut self, listed: BTreeMap<String, Member>, now: Instant) -> Vec<Event> {
        let (mut left, mut events, mut missing) = (Vec::new(), Vec::new(), BTreeMap::new());
        self.members.retain(|name, member| {
            if listed.contains_key(name) {
                return true;
            }
            // A member of a list without leases does not join again.
            let grace = (!member.lease.is_zero()).then_some(2 * member.lease + GRACE);
            // Another interruption does not begin its grace anew.
            let known = self.missing.get(name).copied();
            let until = known.or_else(|| Some(self.interrupted? + grace?)).filter(|until| now < *until);
            match until {
                Some(until) => _ = missing.insert(name.clone(), until),
                None => left.push(Event::Left(member.clone())),
            }
            until.is_some()
        });
        for (name, member) in listed {
            match self.members.get_mut(&name) {
                Some(known) if *known == member => {}
                Some(known) => {
                    let before = std::mem::replace(known, member.clone());
                    events.push(Event::Changed { member, before });
                }
                None => {
                    self.members.insert(name, member.clone());
                    events.push(Event::Joined(member));
                }
            }
        }
        self.missing = missing;
        left.append(&mut events);
        left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(members: &[(&str, u64)]) -> BTreeMap<String, Member> {
        let member = |(name, incarnation): &(&str, u64)| {
            let mut member = Member::new(*name, *incarnation).address("a:1");
            member.lease = Duration::from_secs(3);
            (member.name.clone(), member)
        };
        members.iter().map(member).collect()
    }

    fn told(events: Vec<Event>) -> Vec<String> {
        let tell = |event| match event {
            Event::Joined(member) => format!("+{}{}", member.name, member.incarnation),
            Event::Left(member) => format!("-{}{}", member.name, member.incarnation),
            Event::Changed { member, before } => {
                format!("{}{}>{}", member.name, before.incarnation, member.incarnation)
            }
            other => format!("{other:?}"),
        };
        events.into_iter().map(tell).collect()
    }

    #[test]
    fn tells_the_differences() {
        let (mut view, now) = (View::default(), Instant::now());
        assert_eq!(told(view.update(listed(&[("a", 1), ("b", 1)]), now)), ["+a1", "+b1"]);
        assert_eq!(told(view.update(listed(&[("a", 1), ("b", 1)]), now)), [""; 0]);
        assert_eq!(told(view.update(listed(&[("a", 2), ("c", 1)]), now)), ["-b1", "a1>2", "+c1"]);
        assert_eq!(told(view.update(listed(&[]), now)), ["-a2", "-c1"]);
    }

    /// A store that comes back empty: members that join again within their lease have never left.
    #[test]
    fn an_interrupted_store_gives_members_their_lease() {
        let (mut view, start) = (View::default(), Instant::now());
        let after = |millis| start + Duration::from_millis(millis);
        view.update(listed(&[("a", 1), ("b", 1)]), start);
        view.interrupted(start, start);
        assert_eq!(told(view.update(listed(&[]), start)), [""; 0]);
        assert_eq!(view.due(), Some(after(11_000)));
        assert_eq!(told(view.update(listed(&[("a", 1), ("c", 1)]), after(2000))), ["+c1"]);
        assert_eq!(told(view.update(listed(&[("a", 1), ("c", 1)]), after(10_999))), [""; 0]);
        assert_eq!(told(view.update(listed(&[("a", 1), ("c", 1)]), after(11_000))), ["-b1"]);
        assert_eq!(view.due(), None);
        // From then on, a missing member has left.
        assert_eq!(told(view.update(listed(&[("c", 1)]), after(11_001))), ["-a1"]);
    }

    /// Short breaks that follow one another do not keep a dead member; a long one does not cost a member its grace.
    #[test]
    fn a_missing_member_has_one_grace() {
        let (mut view, start) = (View::default(), Instant::now());
        let after = |millis| start + Duration::from_millis(millis);
        view.update(listed(&[("a", 1), ("b", 1)]), start);
        for second in 1..10 {
            view.interrupted(after(second * 1000 - 100), after(second * 1000));
            assert_eq!(told(view.update(listed(&[("a", 1)]), after(second * 1000))), [""; 0]);
            assert_eq!(told(view.update(listed(&[("a", 1)]), after(second * 1000 + 900))), [""; 0]);
        }
        // The store was away for 8 times 100 ms since the first list without it.
        assert_eq!(view.due(), Some(after(12_800)));
        view.interrupted(after(10_000), after(60_000));
        let due = after(62_800);
        assert_eq!(view.due(), Some(due));
        assert_eq!(told(view.update(listed(&[]), after(60_000))), [""; 0]);
        assert_eq!(told(view.update(listed(&[("a", 1)]), due)), ["-b1"]);
        assert_eq!(view.due(), None);
    }
}

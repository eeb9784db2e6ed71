//! The fleet as the test sees it.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use multirail::{Fabric, wait};
use multirail_discovery::{ElasticGroup, ElasticOptions, Event, open};

use crate::events::Events;
use crate::member::MemberProcess;
use crate::servers::Server;
use crate::writer::Writer;
use crate::{LEASE, LIMIT, builder, setting};

/// How much later than a lease, or than a join, an event may come.
const LATENESS: Duration = Duration::from_secs(1);
/// How much longer than two leases the watch keeps a missing member after an outage.
const GRACE: Duration = Duration::from_secs(5);
/// How many members end at the same time.
const WAVE: usize = 6;

pub struct Fleet {
    url: String,
    members: Vec<MemberProcess>,
    events: Events,
    group: Arc<ElasticGroup>,
    writer: Writer,
    _fabric: Fabric,
    random: fastrand::Rng,
    latest_join: Duration,
    latest_leave: Duration,
}

/// How a member ends.
#[derive(Debug, Clone, Copy, PartialEq)]
enum End {
    /// Killed, and started again at once.
    Restarted,
    /// Killed, and started again once the directory has removed it.
    Expired,
    /// It leaves, and is started again.
    Left,
}

impl Fleet {
    /// Starts the members, and waits until the group is connected to all.
    pub fn start(url: &str, count: usize) -> Self {
        let directory = open(url).unwrap();
        let fabric = builder().open().unwrap();
        let events = Events::of(&*directory);
        let group = Arc::new(ElasticGroup::follow(&fabric, &*directory, ElasticOptions::new()).unwrap());
        let writer = Writer::start(&fabric, Arc::clone(&group));
        let seed = fastrand::u64(..);
        println!("{url}: {count} processes, seed {seed}");
        let mut fleet = Self {
            url: url.to_owned(),
            members: Vec::new(),
            events,
            group,
            writer,
            _fabric: fabric,
            random: fastrand::Rng::with_seed(seed),
            latest_join: Duration::ZERO,
            latest_leave: Duration::ZERO,
        };
        fleet.members =
            (0..count).map(|number| MemberProcess::start(url, &format!("member {number}"))).collect();
        for place in 0..count {
            fleet.await_join(place, 0);
        }
        fleet.await_connected();
        fleet
    }

    /// Ends members at random and starts them again, `kills` times.
    pub fn storm(&mut self, kills: usize) {
        let mut left = kills;
        while left > 0 {
            let wave = left.min(WAVE).min(self.members.len());
            left -= wave;
            self.wave(wave);
        }
        self.await_connected();
    }

    fn wave(&mut self, count: usize) {
        let from = self.events.len();
        let mut places: Vec<_> = (0..self.members.len()).collect();
        self.random.shuffle(&mut places);
        places.truncate(count);
        let mut ended = Vec::new();
        for place in places {
            let end = [End::Restarted, End::Expired, End::Left][self.random.usize(..3)];
            let member = &mut self.members[place];
            match end {
                End::Left => member.leave(),
                End::Restarted | End::Expired => member.kill(),
            }
            let at = SystemTime::now();
            if end == End::Restarted {
                let name = self.members[place].name.clone();
                self.members[place] = MemberProcess::start(&self.url, &name);
            }
            ended.push((place, end, at));
        }
        for (place, end, at) in ended {
            if end != End::Restarted {
                let name = self.members[place].name.clone();
                let is_its = |event: &Event| matches!(event, Event::Left(member) if member.name == name);
                let told = self.events.wait(from, &format!("{name} has left"), is_its);
                let took = told.duration_since(at).unwrap_or_default();
                let (lease, latest) = match end {
                    End::Left => (Duration::ZERO, &mut self.latest_join),
                    _ => (LEASE, &mut self.latest_leave),
                };
                *latest = took.max(*latest);
                assert!(took <= lease + limit::stretched(LATENESS), "{name} {end:?}: told after {took:?}");
                self.members[place] = MemberProcess::start(&self.url, &name);
            }
            self.await_join(place, from);
        }
    }

    /// Takes the server away for some seconds, in which the writes to every member go on.
    pub fn outage(&mut self, server: &mut Server) {
        let (from, span) = (self.events.len(), Duration::from_secs(setting("FLEET_OUTAGE", 8) as u64));
        let before = self.writer.results();
        server.stop();
        self.events.wait(from, "the directory does not answer", |event| matches!(event, Event::Outage(_)));
        let noted = self.writer.results();
        std::thread::sleep(span);
        let during = self.writer.results();
        server.go_on();
        self.events.wait(from, "the directory answers", |event| matches!(event, Event::Synced));
        // By then, a member that has not joined again is told to have left.
        std::thread::sleep(2 * LEASE + GRACE + 2 * LATENESS);
        let events = self.events.since(from);
        assert_eq!(events.len(), 2, "an outage and its end, and no change of a member: {events:?}");
        assert_eq!(before.failed, self.writer.results().failed, "no write fails in an outage");
        for member in &self.members {
            let (noted, during) = (noted.done[&member.name], during.done[&member.name]);
            assert!(
                during > noted,
                "{}: {noted} writes when the outage was noted, {during} at its end",
                member.name
            );
        }
        println!("{}: away for {span:?}; {} writes meanwhile", self.url, sum(&during) - sum(&noted));
        self.await_connected();
    }

    /// Ends the fleet. Prints what it has done.
    pub fn end(self) {
        let results = self.writer.end();
        println!(
            "{}: {} writes done, failed: {:?}; the latest join or leave was told after {:?}, the latest end of a lease \
             after {:?}",
            self.url,
            results.done.values().sum::<u64>(),
            results.failed,
            self.latest_join,
            self.latest_leave
        );
        let outages = self.events.since(0).iter().filter(|event| matches!(event, Event::Outage(_))).count();
        assert!(outages <= 1, "{outages} outages");
    }

    /// Waits until a member has joined, and until that is told.
    fn await_join(&mut self, place: usize, from: usize) {
        let (joined, incarnation) = self.members[place].joined();
        let name = self.members[place].name.clone();
        let told = self.events.wait(from, &format!("{name} has joined"), |event| match event {
            Event::Joined(member) | Event::Changed { member, .. } => {
                member.name == name && member.incarnation == incarnation
            }
            _ => false,
        });
        let took = told.duration_since(joined).unwrap_or_default();
        self.latest_join = took.max(self.latest_join);
        assert!(took <= limit::stretched(LATENESS), "{name}: told {took:?} after it has joined");
    }

    /// Waits until the group is connected to all members, and until a write to each has succeeded since.
    fn await_connected(&self) {
        let count = self.members.len();
        let all = self.group.wait_for(|epoch| epoch.members().len() == count);
        assert!(wait(all, LIMIT).is_ok(), "connected to {} of {count}", self.group.connected());
        let before = self.writer.results();
        let is_written = || {
            let now = self.writer.results();
            let done = |member: &MemberProcess| now.done.get(&member.name) > before.done.get(&member.name);
            self.members.iter().all(done).then_some(())
        };
        limit::Limit::of(LIMIT).ask(is_written).expect("a write to every member");
    }
}

fn sum(results: &crate::writer::Results) -> u64 {
    results.done.values().sum()
}

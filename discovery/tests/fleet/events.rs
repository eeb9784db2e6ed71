//! The events of a watch, with the times at which they came.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, SystemTime};

use multirail_discovery::{Directory, Event};

use crate::LIMIT;

/// Collects the events of a watch.
pub struct Events(Arc<Shared>);

#[derive(Default)]
struct Shared {
    list: Mutex<Vec<(SystemTime, Event)>>,
    more: Condvar,
}

impl Events {
    pub fn of(directory: &dyn Directory) -> Self {
        let shared = Arc::<Shared>::default();
        let (collector, mut watch) = (Arc::clone(&shared), directory.watch());
        std::thread::spawn(move || {
            while Arc::strong_count(&collector) > 1 {
                if let Ok(event) = multirail::wait(watch.next(), Duration::from_millis(500)) {
                    collector.list.lock().unwrap().push((SystemTime::now(), event));
                    collector.more.notify_all();
                }
            }
        });
        Self(shared)
    }

    /// The number of events so far.
    pub fn len(&self) -> usize {
        self.0.list.lock().unwrap().len()
    }

    /// The events from a number on.
    pub fn since(&self, from: usize) -> Vec<Event> {
        self.0.list.lock().unwrap()[from..].iter().map(|(_, event)| event.clone()).collect()
    }

    /// Waits for an event, of those from number `from` on, of which `is_it` says so. Returns when it came.
    pub fn wait(&self, from: usize, what: &str, mut is_it: impl FnMut(&Event) -> bool) -> SystemTime {
        let mut limit = limit::Limit::of(LIMIT);
        let mut list = self.0.list.lock().unwrap();
        loop {
            if let Some((at, _)) = list[from..].iter().find(|(_, event)| is_it(event)) {
                return *at;
            }
            let Some(slice) = limit.slice() else { panic!("no event says that {what}: {:?}", &list[from..]) };
            list = self.0.more.wait_timeout(list, slice).unwrap().0;
        }
    }
}

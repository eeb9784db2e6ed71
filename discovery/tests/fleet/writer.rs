//! A thread that writes to all members all the time.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use multirail::{Access, Fabric, WriteOptions, wait};
use multirail_discovery::ElasticGroup;

use crate::{LEN, LIMIT, PAGE};

/// The results so far.
#[derive(Debug, Default, Clone)]
pub struct Results {
    /// The number of writes that have succeeded, by the members' names.
    pub done: BTreeMap<String, u64>,
    /// The number of writes that have failed, by the kinds of their errors.
    pub failed: BTreeMap<String, u64>,
}

/// Writes to all members of a group until it is stopped.
pub struct Writer {
    results: Arc<Mutex<Results>>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Writer {
    pub fn start(fabric: &Fabric, group: Arc<ElasticGroup>) -> Self {
        let (results, stop) = (Arc::<Mutex<Results>>::default(), Arc::<AtomicBool>::default());
        let src = fabric.alloc(LEN, Access::LOCAL).unwrap();
        let (told, stopped) = (Arc::clone(&results), Arc::clone(&stop));
        let write = move || {
            let options = WriteOptions::new().deadline(Duration::from_secs(20));
            while !stopped.load(Ordering::Relaxed) {
                let writes = group.write_all(&src, 0..LEN, PAGE, 0, &options);
                let ended = wait(writes, LIMIT).expect("every write ends");
                let mut results = told.lock().unwrap();
                for (member, result) in ended {
                    let count = match result {
                        Ok(outcome) => {
                            assert_eq!(outcome.bytes, LEN as u64);
                            results.done.entry(member.name().to_owned()).or_default()
                        }
                        Err(error) => results.failed.entry(format!("{:?}", error.kind())).or_default(),
                    };
                    *count += 1;
                }
                drop(results);
                // The members share this machine's cores.
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        Self { results, stop, thread: std::thread::spawn(write) }
    }

    pub fn results(&self) -> Results {
        self.results.lock().unwrap().clone()
    }

    /// Ends the thread, once its last writes have ended.
    pub fn end(self) -> Results {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
        self.results.lock().unwrap().clone()
    }
}

//! Endpoints of `shm` open beside what a killed process with our number has left, and leave nothing.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

use std::path::PathBuf;
use std::sync::Arc;

use multirail_efa::{Efa, EfaConfig};
use multirail_spi::{Backend, DomainSetup, EndpointConfig, SystemClock};

/// Files of this process as the provider itself would name them, which are removed in the end.
struct Left(Vec<PathBuf>);

impl Left {
    fn by_a_killed_one() -> Self {
        // SAFETY: it only tells the user's number.
        let (process, user) = (std::process::id(), unsafe { libc::getuid() });
        let files = (0..8).map(|number| PathBuf::from(format!("/dev/shm/{process}:{user}:{number}")));
        let files: Vec<_> = files.collect();
        files.iter().for_each(|file| std::fs::write(file, [0; 4096]).unwrap());
        Self(files)
    }
}

impl Drop for Left {
    fn drop(&mut self) {
        for file in &self.0 {
            let _ = std::fs::remove_file(file);
        }
    }
}

/// How many files of /dev/shm are of this process: two for each endpoint.
fn ours() -> usize {
    let process = std::process::id().to_string();
    let names = std::fs::read_dir("/dev/shm").unwrap().flatten().map(|file| file.file_name());
    let is_ours = |name: &String| name.starts_with("multirail:") && name.split(':').nth(2) == Some(&process);
    names.filter_map(|name| name.into_string().ok()).filter(is_ours).count()
}

#[test]
fn a_number_used_before() {
    let efa = Efa::with(EfaConfig::default().provider("shm"));
    let devices = match efa.probe() {
        Ok(devices) => devices,
        Err(why) => return eprintln!("skipped: {}; {}", why.reason, why.remedy),
    };
    let left = Left::by_a_killed_one();
    let setup =
        DomainSetup { clock: Arc::new(SystemClock::default()), seed: 1, incarnation: 1, sleeps: true };
    let domain = efa.open(&devices[0], &setup).unwrap();
    let endpoint = domain.endpoint(EndpointConfig::default()).unwrap();
    assert_eq!(ours(), 2);
    drop((endpoint, domain));
    assert_eq!(ours(), 0);
    assert!(left.0.iter().all(|file| file.exists()), "another's file was removed");
}

//! Endpoints of `shm` can be opened although a killed process with the same number has left files, and leave no files
//! themselves.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

use std::path::PathBuf;
use std::sync::Arc;

use multirail_efa::{Efa, EfaConfig};
use multirail_spi::{Backend, DomainSetup, EndpointConfig, SystemClock};

/// Files with the names that the provider itself would choose for this process. Removed when dropped.
struct StaleFiles(Vec<PathBuf>);

impl StaleFiles {
    fn of_a_killed_process() -> Self {
        // SAFETY: only returns the user's number.
        let (process, user) = (std::process::id(), unsafe { libc::getuid() });
        let files = (0..8).map(|number| PathBuf::from(format!("/dev/shm/{process}:{user}:{number}")));
        let files: Vec<_> = files.collect();
        files.iter().for_each(|file| std::fs::write(file, [0; 4096]).unwrap());
        Self(files)
    }
}

impl Drop for StaleFiles {
    fn drop(&mut self) {
        for file in &self.0 {
            let _ = std::fs::remove_file(file);
        }
    }
}

/// The number of files of this process in /dev/shm: two for each endpoint.
fn own_files() -> usize {
    let process = std::process::id().to_string();
    let names = std::fs::read_dir("/dev/shm").unwrap().flatten().map(|file| file.file_name());
    let is_ours = |name: &String| name.starts_with("multirail:") && name.split(':').nth(2) == Some(&process);
    names.filter_map(|name| name.into_string().ok()).filter(is_ours).count()
}

#[test]
fn files_of_a_former_process_with_the_same_number_do_no_harm() {
    let efa = Efa::with(EfaConfig::default().provider("shm"));
    let devices = match efa.probe() {
        Ok(devices) => devices,
        Err(why) => return eprintln!("skipped: {}; {}", why.reason, why.remedy),
    };
    let left = StaleFiles::of_a_killed_process();
    let setup =
        DomainSetup { clock: Arc::new(SystemClock::default()), seed: 1, incarnation: 1, worker_sleeps: true };
    let domain = efa.open(&devices[0], &setup).unwrap();
    let endpoint = domain.endpoint(EndpointConfig::default()).unwrap();
    assert_eq!(own_files(), 2);
    drop((endpoint, domain));
    assert_eq!(own_files(), 0);
    assert!(left.0.iter().all(|file| file.exists()), "a file of another program was removed");
}

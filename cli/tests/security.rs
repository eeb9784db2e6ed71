//! `--token-file` and the options of TLS.
#![cfg(target_os = "linux")]

#[cfg(feature = "tls")]
#[allow(dead_code, reason = "another test uses the rest")]
#[path = "../../transport-core/src/tests/control/certificates.rs"]
mod certificates;
mod process;

use std::fs;

use process::{LIMIT, RunningCommand, multirail};
use tempfile::TempDir;

struct TestDirectory {
    root: TempDir,
}

impl TestDirectory {
    fn new() -> Self {
        let place = Self { root: TempDir::new().unwrap() };
        fs::create_dir(place.path("into")).unwrap();
        place.file("content", "what is sent");
        place.file("token", "3a7bd3e2360a3d29eea436fcfb7e44c735d117c4\n");
        place.file("other", "0000000000000000000000000000000000000000\n");
        place
    }

    fn path(&self, name: &str) -> String {
        self.root.path().join(name).to_str().unwrap().to_owned()
    }

    fn file(&self, name: &str, content: &str) -> String {
        fs::write(self.path(name), content).unwrap();
        self.path(name)
    }

    fn serve(&self, options: &[&str]) -> (RunningCommand, String) {
        RunningCommand::server(&[&["serve", "--overwrite", "--into", &self.path("into")], options].concat())
    }

    fn send(&self, to: &str, options: &[&str]) -> RunningCommand {
        RunningCommand::start(&[&["send", &self.path("content"), "--to", to], options].concat())
    }

    /// Takes the received file and returns its content.
    fn arrived(&self) -> Option<String> {
        let path = self.root.path().join("into/content");
        let content = fs::read_to_string(&path).ok()?;
        fs::remove_file(path).unwrap();
        Some(content)
    }
}

#[test]
fn files_are_sent_with_the_same_token() {
    let place = TestDirectory::new();
    let (token, other) = (place.path("token"), place.path("other"));
    let (server, address) = place.serve(&["--token-file", &token]);
    place.send(&address, &["--token-file", &token]).succeeds();
    assert_eq!(place.arrived().as_deref(), Some("what is sent"));

    let sentence = place.send(&address, &["--token-file", &other]).fails_within(LIMIT);
    assert!(sentence.contains("give both sides the same"), "{sentence}");
    let sentence = place.send(&address, &[]).fails_within(LIMIT);
    assert!(
        sentence.contains("the peer asks for a token") && sentence.contains("--token-file"),
        "{sentence}"
    );
    assert_eq!(place.arrived(), None);
    // The token from the environment works, and the server still works.
    let mut by_environment = multirail(&["send", &place.path("content"), "--to", &address]);
    by_environment.env("MULTIRAIL_TOKEN_FILE", &token);
    RunningCommand::spawn(by_environment).succeeds();
    assert_eq!(place.arrived().as_deref(), Some("what is sent"));
    assert!(server.errors().iter().all(|line| !line.contains("panicked")));

    // Each directory has one server.
    drop(server);
    let (_open, address) = place.serve(&[]);
    let sentence = place.send(&address, &["--token-file", &token]).fails_within(LIMIT);
    assert!(sentence.contains("this side has a token and the peer has none"), "{sentence}");
}

#[test]
fn invalid_tokens_are_refused_before_anything_is_sent() {
    let place = TestDirectory::new();
    let short = place.file("short", "short\n");
    let sentence = place.send("127.0.0.1:1", &["--token-file", &short]).fails_within(LIMIT);
    assert!(sentence.contains("openssl rand -hex 32"), "{sentence}");
    let sentence = place.send("127.0.0.1:1", &["--token-file", &place.path("none")]).fails_within(LIMIT);
    assert!(sentence.contains("none"), "{sentence}");
}

#[test]
fn a_bench_of_two_processes_passes_the_token_on() {
    let place = TestDirectory::new();
    let token = place.path("token");
    let bench = ["bench", "--duration", "50ms", "--pages", "4", "--token-file", &token];
    RunningCommand::start(&bench).succeeds();
}

#[cfg(feature = "tls")]
#[test]
fn files_are_sent_over_tls_with_one_authority() {
    use certificates::Authority;

    let place = TestDirectory::new();
    let (ca, foreign) = (Authority::new("ca"), Authority::new("foreign"));
    let roots = place.file("ca.pem", &ca.root);
    let options = |name: &str, authority: &Authority| {
        let certified = authority.certify(&["127.0.0.1"]);
        let certificate = place.file(&format!("{name}.pem"), &certified.certificate);
        let key = place.file(&format!("{name}.key"), &certified.key);
        [
            ["--tls-cert".to_owned(), certificate],
            ["--tls-key".into(), key],
            ["--tls-ca".into(), roots.clone()],
        ]
        .concat()
    };
    fn text(options: &[String]) -> Vec<&str> {
        options.iter().map(String::as_str).collect()
    }
    let (a, b, c) = (options("a", &ca), options("b", &ca), options("c", &foreign));
    let token = place.path("token");
    let with_token = |options: &[String]| [options, &["--token-file".to_owned(), token.clone()]].concat();
    let (server, address) = place.serve(&text(&with_token(&a)));
    place.send(&address, &text(&with_token(&b))).succeeds();
    assert_eq!(place.arrived().as_deref(), Some("what is sent"));

    let sentence = place.send(&address, &text(&with_token(&c))).fails_within(LIMIT);
    assert!(sentence.contains("does not accept our certificate"), "{sentence}");
    let sentence = place.send(&address, &text(&with_token(&[]))).fails_within(LIMIT);
    assert!(sentence.contains("the other side speaks TLS"), "{sentence}");
    let sentence = place.send(&address, &text(&b)).fails_within(LIMIT);
    assert!(sentence.contains("the peer asks for a token"), "{sentence}");
    assert_eq!(place.arrived(), None);

    drop(server);
    let (_plain, address) = place.serve(&[]);
    let sentence = place.send(&address, &text(&b)).fails_within(LIMIT);
    assert!(sentence.contains("does not speak TLS"), "{sentence}");
}

//! Manual pages and completion scripts, as packages take them from the command.

mod process;

use std::collections::BTreeSet;

use process::run;

/// The names of all commands, with the names of those around them, as help lists them.
fn commands() -> BTreeSet<Vec<String>> {
    fn add(all: &mut BTreeSet<Vec<String>>, words: &[String]) {
        let words_and_help: Vec<&str> = words.iter().map(String::as_str).chain(["--help"]).collect();
        let (done, help, said) = run(&words_and_help);
        assert!(done, "{words:?}: {said}");
        let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1);
        for line in listed.take_while(|line| line.starts_with("  ")) {
            let name = line.split_whitespace().next().expect("a word");
            // A further line of the command before it begins further to the right.
            if line.starts_with("   ") || name == "help" {
                continue;
            }
            let words = [words, &[name.to_owned()]].concat();
            add(all, &words);
            all.insert(words);
        }
    }
    let mut all = BTreeSet::new();
    add(&mut all, &[]);
    assert!(all.len() > 15 && all.contains(&vec!["bench".to_owned(), "client".to_owned()]), "{all:?}");
    all
}

#[test]
fn each_command_has_a_manual_page() {
    let folder = tempfile::tempdir().expect("a folder");
    let into = folder.path().join("man");
    let (done, said, errors) = run(&["man", "--dir", into.to_str().expect("UTF-8")]);
    assert!(done && said.is_empty() && errors.is_empty(), "{said}{errors}");
    let files = std::fs::read_dir(&into).expect("the folder");
    let files: BTreeSet<_> =
        files.map(|file| file.expect("a file").file_name().into_string().expect("UTF-8")).collect();
    let mut wanted = BTreeSet::from(["multirail.1".to_owned()]);
    wanted.extend(commands().iter().map(|words| format!("multirail-{}.1", words.join("-"))));
    assert_eq!(files, wanted);
    let read = |name: &str| std::fs::read_to_string(into.join(name)).expect("a page");
    for name in &files {
        let page = read(name);
        for section in [".TH ", ".SH NAME\n", ".SH SYNOPSIS\n", ".SH DESCRIPTION\n", "Exit code: "] {
            assert!(page.contains(section) || (name == "multirail.1"), "{name} lacks {section}:\n{page}");
        }
        assert!(page.contains(&format!("\"multirail {}\"", env!("CARGO_PKG_VERSION"))), "{name}:\n{page}");
    }
    let root = read("multirail.1");
    for words in commands().iter().filter(|words| words.len() == 1) {
        assert!(root.contains(&format!("multirail\\-{}(1)", words[0])), "{words:?}:\n{root}");
    }
    assert!(read("multirail-bench.1").contains("\\-\\-sweep"));
    assert_eq!(run(&["man"]), (true, root, String::new()));
}

#[test]
fn completions_name_each_command() {
    for shell in ["bash", "zsh", "fish"] {
        let (done, script, said) = run(&["completions", shell]);
        assert!(done && said.is_empty(), "{said}");
        let words: BTreeSet<_> =
            script.split(|c: char| !c.is_alphanumeric() && c != '-' && c != '_').collect();
        for command in commands().iter().flatten() {
            assert!(words.contains(command.as_str()), "{shell} lacks {command}");
        }
        assert!(script.contains("sweep"), "{shell} lacks the options");
    }
    let (done, _, said) = run(&["completions", "none"]);
    assert!(!done && said.contains("bash"), "{said}");
}

/// The scripts are accepted by their shells, where these are installed; bash completes the words.
#[test]
fn shells_accept_the_scripts() {
    let folder = tempfile::tempdir().expect("a folder");
    for shell in ["bash", "zsh", "fish"] {
        let file = folder.path().join(shell);
        std::fs::write(&file, run(&["completions", shell]).1).expect("a file");
        match std::process::Command::new(shell).arg("-n").arg(&file).env("LC_ALL", "C").output() {
            Ok(output) => assert!(output.status.success() && output.stderr.is_empty(), "{output:?}"),
            Err(error) => println!("skipped: {shell}: {error}"),
        }
    }
    let complete = "source \"$0\"; COMP_WORDS=(multirail be); COMP_CWORD=1; _multirail multirail be multirail; \
        echo \"${COMPREPLY[@]}\"";
    if let Ok(output) =
        std::process::Command::new("bash").args(["-c", complete]).arg(folder.path().join("bash")).output()
    {
        assert_eq!(String::from_utf8_lossy(&output.stdout), "bench\n", "{output:?}");
    }
}

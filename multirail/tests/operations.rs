//! Checks that `docs/operations.md` shows the output of `explain`.

use std::path::PathBuf;
use std::sync::Arc;

use backend_loopback::{Loopback, LoopbackConfig};
use multirail::{
    Access, Explanation, Fabric, FabricBuilder, Pages, Result, SendOptions, TransportConfig, WriteOptions,
};

const MIB: usize = 1 << 20;

fn open(labels: &[&str]) -> Result<Fabric> {
    let loopback = || Arc::new(Loopback::with(LoopbackConfig::default().devices(4)));
    let transports = labels.iter().map(|label| TransportConfig::new(*label, loopback()));
    transports.fold(FabricBuilder::new().caller_driven(), FabricBuilder::transport).open()
}

/// The explanations of the page, by their names on it.
fn explanations() -> Result<Vec<(&'static str, Explanation)>> {
    let (here, there) = (open(&["cards", "loopback"])?, open(&["loopback"])?);
    let (peer, _) = here.connect_local(&there)?;
    let (near, far) = (here.alloc(64 * MIB, Access::LOCAL)?, there.alloc(64 * MIB, Access::REMOTE_WRITE)?);
    let remote = peer.import(&far.descriptor())?;
    let (from, to) =
        (Pages::new((0..1022).collect::<Vec<_>>()), Pages::new((0..1022).rev().collect::<Vec<_>>()));
    let (plain, imm) = (WriteOptions::new(), WriteOptions::new().imm(7));
    Ok(vec![
        ("small", peer.explain_write(&near, 0..4096, &remote, 0, &plain)?),
        ("large", peer.explain_write(&near, 0..17 * MIB, &remote, 0, &imm)?),
        ("pages", peer.explain_write_pages(&near, &from, &remote, &to, 64 << 10, &imm.clone().per_wr())?),
        ("message", peer.explain_send(&near, 0..1000, &SendOptions::new().imm(7))?),
    ])
}

/// The printed explanation, with the peer's name of the page.
fn printed(explanation: &Explanation) -> String {
    explanation.to_string().replacen(&explanation.peer, "peer 1 (node-b)", 1)
}

fn page() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/operations.md")
}

/// The page with the current outputs.
fn filled(page: &str) -> String {
    let mut page = page.to_owned();
    for (name, explanation) in explanations().unwrap() {
        let head = format!("<!-- explain: {name} -->\n```text\n");
        let start = page.find(&head).unwrap_or_else(|| panic!("the page lacks {head}")) + head.len();
        let end = start + page[start..].find("```\n").unwrap();
        page.replace_range(start..end, &(printed(&explanation) + "\n"));
    }
    page
}

#[test]
fn the_page_is_current() {
    let shown = std::fs::read_to_string(page()).unwrap();
    let true_page = filled(&shown);
    let differs = shown.lines().zip(true_page.lines()).find(|(shown, says)| shown != says);
    assert!(shown == true_page, "{differs:?}: cargo test -p multirail --test operations -- --ignored write");
}

#[test]
#[ignore = "writes the page"]
fn write() {
    let shown = std::fs::read_to_string(page()).unwrap();
    std::fs::write(page(), filled(&shown)).unwrap();
}

/// The explanation as JSON.
#[test]
fn it_serializes() {
    let all = explanations().unwrap();
    let large = serde_json::to_value(&all[1].1).unwrap();
    assert_eq!(large["operation"], "Write");
    assert_eq!(large["transports"][0]["taken"], false);
    let requests = large["rails"].as_array().unwrap().iter().map(|rail| rail["requests"].as_u64().unwrap());
    assert!(requests.sum::<u64>() > 1);
}

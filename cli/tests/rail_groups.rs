//! Rail groups from environment variables, as the program uses them.
#![cfg(unix)]

mod process;

use process::multirail;
use serde_json::Value;

/// The output of `info` for loopback with two devices, or its error.
fn loopback(variables: &[(&str, &str)]) -> Result<Value, String> {
    let mut info = multirail(&["info", "--backend", "loopback", "--json"]);
    info.env("MULTIRAIL_LOOPBACK_THREADS", "2").envs(variables.iter().copied());
    let output = info.output().expect("start");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let row: Value = serde_json::from_str(text.lines().next().ok_or(said)?).expect("JSON");
    match row["available"] == true {
        true => Ok(row),
        false => Err(row["reason"].to_string()),
    }
}

#[test]
fn listed_devices_are_driven_together() {
    let apart = loopback(&[]).unwrap();
    assert_eq!(apart["groups"].as_array().map(Vec::len), Some(2));
    let together = loopback(&[("MULTIRAIL_RAIL_GROUPS", "lo1,lo0")]).unwrap();
    assert_eq!(together["groups"].as_array().map(Vec::len), Some(1));
    let core = topology::Cpus::of_this_thread().unwrap().0.first().copied().unwrap();
    let list = format!("lo1@{core}");
    let first = loopback(&[("MULTIRAIL_RAIL_GROUPS", &list)]).unwrap();
    let group = &first["groups"][0];
    assert_eq!((&group["devices"][0], &group["core"]), (&Value::from("lo1"), &Value::from(core)));
    assert_eq!(first["groups"][1]["devices"][0], "lo0");
}

#[test]
fn invalid_variables_are_named() {
    for (variable, value, says) in [
        ("MULTIRAIL_RAIL_GROUPS", "lo0,,lo1", "a name is missing"),
        ("MULTIRAIL_RAIL_GROUPS", "lo7", "\\\"lo7\\\""),
        ("MULTIRAIL_RAIL_GROUPS", "lo0@99999", "CPU 99999"),
        ("MULTIRAIL_GPUS", "gpu0", "gpu0"),
        ("MULTIRAIL_TOPOLOGY", "file:/nowhere/machine.toml", "/nowhere/machine.toml"),
    ] {
        let refused = loopback(&[(variable, value)]).unwrap_err();
        assert!(refused.contains(says), "{variable}={value}: {refused}");
    }
}

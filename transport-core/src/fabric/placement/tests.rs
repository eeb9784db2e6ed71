use topology::Description;

use super::*;

fn device(name: &str, address: Option<&str>, group: Option<u32>) -> DeviceInfo {
    DeviceInfo {
        name: name.into(),
        about: String::new(),
        link_bits_per_s: None,
        address: address.map(|address| address.parse().unwrap()),
        group,
    }
}

fn names(devices: &[DeviceInfo]) -> Vec<&str> {
    devices.iter().map(|device| device.name.as_str()).collect()
}

#[test]
fn cards_come_to_their_gpus_and_others_keep_their_groups() {
    let p5 = Description::p5().machine().unwrap();
    let mut devices = vec![
        device("soft", None, None),
        device("b", Some("0000:93:00.0"), None),
        device("lo0", None, Some(0)),
        device("a", Some("0000:50:00.0"), None),
        device("c", Some("0000:4f:00.0"), None),
        device("lo1", None, Some(0)),
    ];
    let placed = RailGroups::Nearest.place(&mut devices, Some(&p5));
    assert_eq!(names(&devices), ["a", "c", "b", "lo0", "lo1", "soft"]);
    let rails: Vec<_> = placed.iter().map(|(rails, _)| rails.clone()).collect();
    assert_eq!(rails, [0..2, 2..3, 3..5, 5..6]);
    let gpus: Vec<_> = placed.iter().map(|(_, place)| place.gpus.len()).collect();
    assert_eq!(gpus, [4, 4, 0, 0]);
    let cores: Vec<_> = placed.iter().map(|(_, place)| (place.node, place.core)).collect();
    assert_eq!(cores, [(Some(0), Some(1)), (Some(1), Some(48)), (None, None), (None, None)]);
}

#[test]
fn without_a_machine_backends_decide() {
    let mut devices =
        vec![device("a", Some("0000:50:00.0"), Some(7)), device("b", None, None), device("c", None, Some(7))];
    let placed = RailGroups::Nearest.place(&mut devices, None);
    assert_eq!(names(&devices), ["a", "c", "b"]);
    assert_eq!(placed, [(0..2, Place::default()), (2..3, Place::default())]);
}

#[test]
fn listed_groups_are_as_listed() {
    let p5 = Description::p5().machine().unwrap();
    let groups: RailGroups = "b, a@7 ;c".parse().unwrap();
    let mut devices = vec![
        device("a", Some("0000:4f:00.0"), None),
        device("b", Some("0000:93:00.0"), None),
        device("c", Some("0000:60:00.0"), None),
        device("d", None, Some(3)),
    ];
    groups.check(&["a", "b", "c", "d"]).unwrap();
    let placed = groups.place(&mut devices, Some(&p5));
    assert_eq!(names(&devices), ["a", "b", "c", "d"]);
    let rails: Vec<_> = placed.iter().map(|(rails, _)| rails.clone()).collect();
    assert_eq!(rails, [0..2, 2..3, 3..4]);
    assert_eq!((placed[0].1.core, placed[1].1.core), (Some(7), None));
    // Between the two groups every GPU is served.
    assert_eq!(placed.iter().map(|(_, place)| place.gpus.len()).sum::<usize>(), 8);
    assert!(groups.check(&["a", "b"]).unwrap_err().context().contains("\"c\""));
    let twice: RailGroups = "a;a".parse().unwrap();
    assert!(twice.check(&["a"]).unwrap_err().context().contains("twice"));
}

#[test]
fn lists_that_make_no_sense_are_refused() {
    for wrong in ["", "a,,b", ";", "a@", "a@x", "a@-1"] {
        assert!(wrong.parse::<RailGroups>().is_err(), "{wrong:?}");
    }
    assert_eq!("nearest".parse::<RailGroups>().unwrap(), RailGroups::Nearest);
}

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
    let placed = RailGroups::Nearest.place(&mut devices, Some(&p5), None);
    assert_eq!(names(&devices), ["c", "a", "b", "lo0", "lo1", "soft"]);
    let rails: Vec<_> = placed.iter().map(|(rails, _)| rails.clone()).collect();
    assert_eq!(rails, [0..2, 2..3, 3..5, 5..6]);
    let gpus: Vec<_> = placed.iter().map(|(_, location)| location.gpus.len()).collect();
    assert_eq!(gpus, [4, 4, 0, 0]);
    let cores: Vec<_> = placed.iter().map(|(_, location)| (location.node, location.cores.len())).collect();
    assert_eq!(cores, [(Some(0), 48), (Some(1), 48), (None, 0), (None, 0)]);
    assert!(placed.iter().all(|(_, location)| location.core.is_none()), "workers choose");
    // One GPU only is to be served.
    let only = ["0000:b9:00.0".parse().unwrap()];
    let placed = RailGroups::Nearest.place(&mut devices, Some(&p5), Some(&only));
    assert_eq!(placed[0].1.gpus, only);
}

#[test]
fn without_a_machine_backends_decide() {
    let mut devices =
        vec![device("a", Some("0000:50:00.0"), Some(7)), device("b", None, None), device("c", None, Some(7))];
    let placed = RailGroups::Nearest.place(&mut devices, None, None);
    assert_eq!(names(&devices), ["a", "c", "b"]);
    assert_eq!(placed, [(0..2, GroupLocation::default()), (2..3, GroupLocation::default())]);
}

#[test]
fn listed_groups_are_as_listed() {
    let p5 = Description::p5().machine().unwrap();
    let groups: RailGroups = "b, a@0 ;c".parse().unwrap();
    let mut devices = vec![
        device("a", Some("0000:4f:00.0"), None),
        device("b", Some("0000:93:00.0"), None),
        device("c", Some("0000:60:00.0"), None),
        device("d", None, Some(3)),
        device("e", None, Some(3)),
    ];
    groups.check(&["a", "b", "c", "d"]).unwrap();
    let placed = groups.place(&mut devices, Some(&p5), None);
    assert_eq!(names(&devices), ["a", "b", "c", "d", "e"]);
    let rails: Vec<_> = placed.iter().map(|(rails, _)| rails.clone()).collect();
    assert_eq!(rails, [0..2, 2..3, 3..4, 4..5], "each that is not listed by itself");
    assert_eq!((placed[0].1.core, placed[1].1.core), (Some(0), None));
    // The two groups together serve every GPU. The first group serves some from across the machine.
    assert_eq!(placed.iter().map(|(_, location)| location.gpus.len()).sum::<usize>(), 8);
    assert_eq!(placed[0].1.distance, Some(Distance::Machine));
}

#[test]
fn a_gpu_is_served_by_the_listed_one_of_its_cards() {
    let p5 = Description::p5().machine().unwrap();
    let mut devices = vec![device("a", Some("0000:4f:00.0"), None), device("b", Some("0000:50:00.0"), None)];
    let placed = RailGroups::from_str("b").unwrap().place(&mut devices, Some(&p5), None);
    assert_eq!(names(&devices), ["b", "a"]);
    assert_eq!((placed[0].1.gpus.len(), placed[1].1.gpus.len()), (8, 0));
}

#[test]
fn lists_name_what_is_there_once() {
    for (list, says) in
        [("a;c", "\"c\""), ("a;a", "twice"), ("a@99999", "CPU 99999"), ("a@0;b@0", "CPU 0 twice")]
    {
        let refused = RailGroups::from_str(list).unwrap().check(&["a", "b"]).unwrap_err();
        assert!(refused.context().contains(says), "{list}: {refused}");
    }
}

#[test]
fn lists_that_make_no_sense_are_refused() {
    for wrong in ["", "a,,b", ";", "a@", "a@x", "a@-1"] {
        assert!(wrong.parse::<RailGroups>().is_err(), "{wrong:?}");
    }
    assert_eq!("nearest".parse::<RailGroups>().unwrap(), RailGroups::Nearest);
}

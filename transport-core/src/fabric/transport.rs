//! One opened transport: its domains, its rail groups, and the threads that drive them.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use topology::{Address, Machine};

use super::core_reservation::CoreReservation;
use super::group::Group;
use super::placement::PlacementPolicy;
use super::{GroupLocation, TransportConfig, Workers, lock};
use crate::engine::flow_control::ReceiverCredits;
use crate::engine::index::{GroupIndex, Number, TransportIndex};
use crate::engine::memory::RetainedMemory;
use crate::engine::trace::StallMonitor;
use crate::engine::worker::{Worker, WorkerSetup};
use crate::engine::{Engine, EngineHandle, HandleSetup, OperationCounters, Rail, RailCounters, RailCounts};
use crate::notifications::{self, NotificationGrants};
use crate::spi::{Capabilities, DeviceInfo, Domain, DomainSetup, MemoryRegion};
use crate::{Access, Error, ErrorKind, GrantPolicy, Memory, Result, WakeupHandle, WakeupPipe};

/// The most devices of a companion. Messages go over the first; the second one is for the time after its loss.
const COMPANION_DEVICES: usize = 2;
/// What the label of a companion ends with.
pub(super) const COMPANION_SUFFIX: &str = "+notifications";

pub(crate) struct Transport {
    pub label: String,
    /// Whether this is the companion of the transport before it: it carries notifications, and nothing else.
    pub is_companion: bool,
    pub backend: &'static str,
    /// The device of each rail, group after group.
    pub devices: Vec<DeviceInfo>,
    pub locations: Vec<GroupLocation>,
    pub domains: Vec<Arc<dyn Domain>>,
    /// At least one.
    pub groups: Vec<Group>,
    /// The threads that drive the groups, until the transport is closed. Empty if the caller drives them.
    workers: Mutex<Vec<ReservedWorker>>,
}

/// A worker, and the core that is reserved for it. The reservation ends after the thread: fields are dropped in order.
type ReservedWorker = (Worker, Option<CoreReservation>);

/// The index of the thread that drives a group. Neighbouring groups share a thread.
fn worker_index(group: usize, threads: usize, groups: usize) -> usize {
    group * threads / groups
}

pub(super) struct OpenSettings<'a> {
    /// The transport's number, and the number of its first rail group.
    pub transport: TransportIndex,
    pub first_group: GroupIndex,
    pub max_operations: usize,
    pub caller_driven: bool,
    pub records: usize,
    pub stall_monitor: Arc<StallMonitor>,
    pub workers: &'a Workers,
    pub placement: &'a PlacementPolicy,
    pub grant_policy: Arc<dyn GrantPolicy>,
    /// The memory that regions of the fabric have released.
    pub retained: &'a Arc<RetainedMemory>,
    /// The memory for arriving notifications, in bytes. `None` opens no companion.
    pub notification_memory: Option<usize>,
}

/// A transport that a fabric has opened.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct TransportInfo {
    /// The transport's label. Peers match transports by it.
    pub label: String,
    /// The backend's name.
    pub backend: &'static str,
    /// The devices, one rail each, group after group.
    pub devices: Vec<DeviceInfo>,
    /// The rails of each rail group.
    pub groups: Vec<Range<usize>>,
    /// The location of each rail group.
    pub locations: Vec<GroupLocation>,
    /// The capabilities of the first device.
    pub capabilities: Capabilities,
}

impl Transport {
    /// The devices of a transport: those that were given, or else those that the backend finds.
    pub(super) fn find_devices(config: &TransportConfig) -> Result<Vec<DeviceInfo>> {
        let devices = match &config.devices {
            Some(devices) => devices.clone(),
            None => config.backend.probe().map_err(|why| {
                let context = format!("backend {}: {}; {}", config.backend.name(), why.reason, why.remedy);
                Error::new(ErrorKind::Unsupported, "open", context)
            })?,
        };
        if devices.is_empty() {
            let context = format!("transport {}: no device was chosen; name at least one", config.label);
            return Err(Error::new(ErrorKind::NotFound, "open", context));
        }
        Ok(devices)
    }

    /// Opens a transport, and its companion if `settings` ask for one.
    pub(super) fn open(
        config: &TransportConfig,
        mut devices: Vec<DeviceInfo>,
        setup: &DomainSetup,
        settings: OpenSettings<'_>,
    ) -> Result<(Self, Option<Self>)> {
        let placed = settings.placement.place(&mut devices)?;
        let (ranges, locations): (Vec<_>, Vec<_>) = placed.into_iter().unzip();
        let mut transport = Self {
            label: config.label.clone(),
            is_companion: false,
            backend: config.backend.name(),
            devices,
            locations,
            domains: Vec::new(),
            groups: Vec::new(),
            workers: Mutex::default(),
        };
        for (position, device) in transport.devices.iter().enumerate() {
            let setup = DomainSetup { seed: setup.seed ^ ((position as u64) << 32), ..setup.clone() };
            transport.domains.push(config.backend.open(device, &setup)?);
        }
        let capacity = transport.domains.iter().map(|domain| domain.capabilities().arrival_depth).min();
        let (label, groups) = (transport.label.clone(), ranges.len() as u64);
        let policy = Arc::clone(&settings.grant_policy);
        let receiver_credits = ReceiverCredits::new(label, capacity.unwrap_or(0), groups, policy);
        let receiver_credits = Arc::new(receiver_credits);
        let group_count = ranges.len();
        let threads = settings.workers.threads.unwrap_or(ranges.len()).min(ranges.len());
        let wakeups = (0..threads).map(|_| WakeupPipe::new()).collect::<Result<Vec<_>>>()?;
        let mut engines = Vec::new();
        for (number, rails) in ranges.iter().enumerate() {
            let wakeup = wakeups[worker_index(number, threads, ranges.len())].handle().try_clone()?;
            engines.push(transport.open_group(
                rails.clone(),
                wakeup,
                setup,
                &settings,
                &receiver_credits,
                ranges.len(),
            )?);
        }
        let (mut companion, mut companion_engine) = (None, None);
        if let Some(memory) = settings.notification_memory {
            let wakeup = wakeups[0].handle().try_clone()?;
            let (opened, engine) = transport.open_companion(config, setup, &settings, memory, wakeup)?;
            (companion, companion_engine) = (Some(opened), Some(engine));
        }
        if settings.caller_driven {
            let groups =
                transport.groups.iter_mut().chain(companion.iter_mut().flat_map(|it| &mut it.groups));
            for (group, engine) in groups.zip(engines.into_iter().chain(companion_engine)) {
                let engine = Arc::new(Mutex::new(engine));
                group.engine.drive_by_caller(&engine);
                group.driven = Some(engine);
            }
            transport.locations.iter_mut().for_each(|location| location.core = None);
        } else {
            let mut by_worker: Vec<_> = (0..threads).map(|_| Vec::new()).collect();
            for (number, engine) in engines.into_iter().enumerate() {
                by_worker[worker_index(number, threads, group_count)].push(engine);
            }
            // Behind the engine that messages arrive at: one step of the thread ends a transfer and sends its
            // notification.
            by_worker[0].extend(companion_engine);
            transport.start_workers(by_worker, wakeups, settings.workers, settings.placement.known())?;
        }
        Ok((transport, companion))
    }

    /// Opens the companion of this transport: its first devices once more. Returns also the companion's engine, which
    /// nothing drives yet; `wakeup` wakes the thread that will.
    fn open_companion(
        &self,
        config: &TransportConfig,
        setup: &DomainSetup,
        settings: &OpenSettings<'_>,
        memory: usize,
        wakeup: WakeupHandle,
    ) -> Result<(Self, Engine)> {
        // Another seed and, for backends that tell domains apart by it, another incarnation than the transport's.
        let setup = DomainSetup { seed: !setup.seed, incarnation: !setup.incarnation, ..setup.clone() };
        let location = self.locations[0].clone();
        let count = self.groups[0].rails.len().min(COMPANION_DEVICES);
        let devices = self.devices[..count].to_vec();
        let open = |device| config.backend.open(device, &setup);
        let domains = devices.iter().map(open).collect::<Result<Vec<_>>>()?;
        let label = format!("{}{COMPANION_SUFFIX}", self.label);
        let depth = domains.iter().map(|domain| domain.capabilities().arrival_depth).min().unwrap_or(0);
        let capacity = depth.min(notifications::buffers(memory).into());
        let credits = ReceiverCredits::new(label.clone(), capacity, 1, Arc::new(NotificationGrants));
        let mut companion = Self {
            label,
            is_companion: true,
            backend: self.backend,
            devices,
            locations: vec![location],
            domains,
            groups: Vec::new(),
            workers: Mutex::default(),
        };
        let settings = OpenSettings {
            transport: TransportIndex::new(settings.transport.position() + 1),
            first_group: settings.first_group.plus(self.groups.len()),
            // Each block of the outbox may be an operation.
            max_operations: settings.max_operations.max(notifications::buffers(memory) as usize),
            stall_monitor: Arc::clone(&settings.stall_monitor),
            grant_policy: Arc::clone(&settings.grant_policy),
            ..*settings
        };
        let engine = companion.open_group(0..count, wakeup, &setup, &settings, &Arc::new(credits), 1)?;
        Ok((companion, engine))
    }

    /// Opens the endpoints of `rails` and makes their engine.
    fn open_group(
        &mut self,
        rails: Range<usize>,
        wakeup: WakeupHandle,
        setup: &DomainSetup,
        settings: &OpenSettings<'_>,
        receiver_credits: &Arc<ReceiverCredits>,
        groups: usize,
    ) -> Result<Engine> {
        let number = self.groups.len();
        let handle = HandleSetup {
            transport: settings.transport,
            group: settings.first_group.plus(number),
            first_rail: rails.start,
            transport_label: self.label.clone(),
            label: if groups > 1 { format!("{}/{number}", self.label) } else { self.label.clone() },
            devices: self.devices[rails.clone()].iter().map(|device| device.name.clone()).collect(),
            max_operations: settings.max_operations,
            records: settings.records,
            stall_monitor: Arc::clone(&settings.stall_monitor),
            receiver_credits: Arc::clone(receiver_credits),
            for_notifications: self.is_companion,
            posting: settings.workers.posting,
        };
        let engine = Arc::new(EngineHandle::new(handle, wakeup));
        let batch = settings.workers.posting.batch;
        let open = |domain: &Arc<dyn Domain>| Rail::open(Arc::clone(domain), batch, settings.retained);
        let opened = self.domains[rails.clone()].iter().map(open).collect::<Result<_>>()?;
        let driven = Engine::new(Arc::clone(&engine), opened, Arc::clone(&setup.clock));
        self.groups.push(Group { engine, rails, driven: None });
        Ok(driven)
    }

    fn start_workers(
        &mut self,
        by_worker: Vec<Vec<Engine>>,
        wakeups: Vec<WakeupPipe>,
        workers: &Workers,
        machine: Option<&Machine>,
    ) -> Result<()> {
        let (threads, groups) = (wakeups.len(), self.groups.len());
        let shared = (!workers.sharded).then(Arc::default);
        for (index, (engines, wakeup)) in by_worker.into_iter().zip(wakeups).enumerate() {
            let is_of_worker = |number: &usize| worker_index(*number, threads, groups) == index;
            let locations: Vec<&GroupLocation> =
                (0..groups).filter(is_of_worker).map(|number| &self.locations[number]).collect();
            let reservation = CoreReservation::for_worker(&workers.pinning, index, &locations, machine);
            let core = reservation.as_ref().map(CoreReservation::cpu);
            (0..groups).filter(is_of_worker).for_each(|number| self.locations[number].core = core);
            let setup = WorkerSetup {
                // The kernel cuts a thread's name after 15 bytes.
                name: format!("mr{index}-{}", self.label),
                engines,
                wakeup,
                core,
                lock: shared.clone(),
            };
            lock(&self.workers).push((Worker::start(setup)?, reservation));
        }
        Ok(())
    }

    /// Registers memory on the rails of group `group`, or on every rail if `group` is `None` or this transport has no
    /// such group.
    ///
    /// # Safety
    /// As [`Domain::register`].
    pub(super) unsafe fn register(
        &self,
        memory: &Arc<dyn Memory>,
        access: Access,
        group: Option<usize>,
    ) -> Result<Vec<Option<Arc<dyn MemoryRegion>>>> {
        let rails = group.and_then(|group| self.groups.get(group)).map(|group| group.rails.clone());
        let register = |(rail, domain): (usize, &Arc<dyn Domain>)| {
            let near = rails.as_ref().is_none_or(|rails| rails.contains(&rail));
            // SAFETY: handed on to the caller.
            near.then(|| unsafe { domain.register(Arc::clone(memory), access) }).transpose()
        };
        self.domains.iter().enumerate().map(register).collect()
    }

    /// The rail group that serves a GPU; for any other PCI function of `machine`, the nearest group.
    pub(super) fn group_of(&self, near: Address, machine: Option<&Machine>) -> Option<usize> {
        let serving = self.locations.iter().position(|location| location.gpus.contains(&near));
        serving.or_else(|| {
            let (machine, from) = (machine?, machine?.function(near)?);
            let distance = |group: &Group| {
                let cards = self.devices[group.rails.clone()].iter().filter_map(|device| device.address);
                cards.filter_map(|card| Some(machine.distance(from, machine.function(card)?))).min()
            };
            let known =
                self.groups.iter().enumerate().filter_map(|(number, group)| Some((distance(group)?, number)));
            known.min().map(|(_, number)| number)
        })
    }

    /// The engine that messages arrive at.
    pub(super) fn first_engine(&self) -> &Arc<EngineHandle> {
        &self.groups[0].engine
    }

    /// The rate of each device in Mbit/s, 0 if unknown.
    pub(super) fn rates(&self) -> Vec<u32> {
        let rate = |device: &DeviceInfo| device.link_bits_per_s.unwrap_or(0) / 1_000_000;
        self.devices.iter().map(|device| u32::try_from(rate(device)).unwrap_or(u32::MAX)).collect()
    }

    /// Whether the device of each rail is lost.
    pub(super) fn lost_rails(&self) -> Vec<bool> {
        self.groups.iter().flat_map(|group| &group.engine.counts).map(RailCounts::is_lost).collect()
    }

    pub(super) fn address(&self) -> (String, Vec<u64>) {
        (self.label.clone(), self.domains.iter().map(|domain| domain.id()).collect())
    }

    pub(super) fn info(&self) -> TransportInfo {
        TransportInfo {
            label: self.label.clone(),
            backend: self.backend,
            devices: self.devices.clone(),
            groups: self.groups.iter().map(|group| group.rails.clone()).collect(),
            locations: self.locations.clone(),
            capabilities: self.domains[0].capabilities().clone(),
        }
    }

    pub(super) fn counters(&self) -> Vec<RailCounters> {
        self.groups.iter().flat_map(|group| self.counters_of(group)).collect()
    }

    pub(super) fn counters_of(&self, group: &Group) -> Vec<RailCounters> {
        let counts = group.rails.clone().zip(&group.engine.counts);
        let read = |(rail, counts): (usize, &RailCounts)| {
            counts.read(&self.label, self.backend, rail as u32, &self.devices[rail].name)
        };
        counts.map(read).collect()
    }

    pub(super) fn operation_counters(&self) -> OperationCounters {
        let mut counters = OperationCounters::new(&self.label);
        self.groups.iter().for_each(|group| group.engine.operations.add_to(&mut counters));
        counters
    }

    pub(super) fn close(&self) {
        drop(std::mem::take(&mut *lock(&self.workers)));
        self.groups.iter().filter_map(|group| group.driven.as_ref()).for_each(|engine| lock(engine).close());
    }
}

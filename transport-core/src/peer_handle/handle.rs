//! The handle that a program holds.

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;

use tokio::sync::oneshot;

use super::handle_state::{self, fabric_closed};
use super::named_regions::Named;
use super::{AddressSource, HandleState, NamedRegions, RebindableTransfer, ReconnectPolicy, ReconnectTask};
use crate::{
    Fabric, LocalList, Pages, Peer, PreparedTransfer, ReadOptions, Region, RemoteCatalogue, RemoteList,
    RemoteRegion, Result, Selection, WriteOptions,
};

/// A peer by its address: gives the current connection, and connects again by a [`ReconnectPolicy`] when the connection
/// is lost. Clones share the handle.
///
/// A [`Peer`] is one connection. Its operations end with `PeerDied` when the peer's process dies, and the handle never
/// repeats them: the new process has other memory, and only the program knows what it needs. The handle gives a new
/// `Peer`, with another number and, of a new process, another [`incarnation`](Peer::incarnation). Regions and
/// catalogues that were looked up by the handle are imported again before the new peer is given out; prepared transfers
/// are made anew ([`RebindableTransfer`]).
///
/// The handle also connects again if the peer closed the connection in order. It does not if this side did, by
/// [`Peer::disconnect`] or by closing the fabric. The policy does not apply to the first connection:
/// [`PeerHandle::connect`] fails at once.
///
/// ```no_run
/// # use std::time::Duration;
/// # use multirail_core::{Fabric, PeerHandle, ReconnectPolicy, Region, Result, WriteOptions};
/// # async fn hand_over(fabric: &Fabric, kv: &Region) -> Result<()> {
/// let policy = ReconnectPolicy::within(Duration::from_secs(60));
/// let decode = PeerHandle::connect(fabric, "10.0.0.7:7411", policy).await?;
/// decode.on_reconnect(|peer| println!("back as {}", peer.id()));
/// let cache = decode.region("cache").await?;
/// let pages = decode.prepare_write_pages(kv, 0..8, &cache, 8..16, 64 << 10, &WriteOptions::new())?;
/// loop {
///     // Waits while the peer is away, and fails once the handle has given up.
///     decode.connected().await?;
///     match pages.current()?.post()?.await {
///         Ok(_) => {}
///         Err(error) => println!("the decoder has to ask for these pages again: {error}"),
///     }
/// #   break Ok(());
/// }
/// # }
/// ```
///
/// # Threads and cleanup
/// A task on the fabric's control thread watches the connection; without a policy there is none. Its delays and
/// attempts count real time. Dropping the last clone ends the task at once, whatever it waits for; the current
/// connection stays, as it does when a `Peer` is dropped. A handle does not keep its fabric open.
///
/// On a caller-driven fabric the task needs the caller's steps only to read a catalogue again. [`wait`](crate::wait)
/// steps while it waits for [`PeerHandle::connected`]. The caller's runtime has to run if there is one:
/// [`FabricBuilder::control_on`](crate::FabricBuilder::control_on).
#[derive(Clone)]
pub struct PeerHandle(Arc<HandleOwner>);

/// What the clones of a handle share. Dropping it stops the task.
struct HandleOwner {
    state: Arc<HandleState>,
    /// Nothing is sent: the task ends when this is dropped.
    _stop: oneshot::Sender<Infallible>,
}

impl PeerHandle {
    /// Connects to the fabric that listens at `address`, as [`Fabric::connect`] does.
    ///
    /// # Errors
    /// Those of [`Fabric::connect`].
    pub fn connect(
        fabric: &Fabric,
        address: &str,
        policy: ReconnectPolicy,
    ) -> impl Future<Output = Result<Self>> + Send + 'static {
        Self::find(fabric, Arc::new(address.to_owned()), policy)
    }

    /// Connects to the first address of `source` that answers, and asks it again for each later attempt.
    ///
    /// # Errors
    /// Those of [`Fabric::connect`], for the last address, and those of [`AddressSource::addresses`].
    pub fn find(
        fabric: &Fabric,
        source: Arc<dyn AddressSource>,
        policy: ReconnectPolicy,
    ) -> impl Future<Output = Result<Self>> + Send + 'static {
        let weak = Arc::downgrade(&fabric.0);
        async move {
            let peer = handle_state::connect(&weak, &*source).await?;
            let fabric = weak.upgrade().ok_or_else(fabric_closed)?;
            let state = Arc::new(HandleState::new(source, &fabric, policy, peer));
            let (stop, stopped) = oneshot::channel();
            if policy.is_on() {
                let spawner = fabric.control_thread("connect")?.spawner();
                let random = fastrand::Rng::with_seed(fabric.next_handle_seed());
                let task = ReconnectTask::new(Arc::clone(&state), spawner.clone(), random);
                spawner.spawn(task.run(stopped));
            }
            Ok(Self(Arc::new(HandleOwner { state, _stop: stop })))
        }
    }

    /// The address that the handle connects to, or the name of its source.
    pub fn address(&self) -> &str {
        self.0.state.source.name()
    }

    /// The current peer. Does not wait.
    ///
    /// # Errors
    /// `PeerDied` or `Closed`: the connection is lost, and this side connects again, or has given up. The text says
    /// which, and [`PeerHandle::connected`] waits. Otherwise those of [`PeerHandle::connected`].
    pub fn peer(&self) -> Result<Peer> {
        self.0.state.peer()
    }

    /// Resolves to the current peer, as soon as there is one. Pass it to [`wait`](crate::wait) to block.
    ///
    /// The future does not keep the handle alive.
    ///
    /// # Errors
    /// `PeerDied` once the handle has given up: the text has the number of attempts and the last one's error. Other
    /// errors of an attempt end the reconnecting before its limit, because they would come again: `Permission` (token,
    /// certificate), `Version`, `InvalidRequest`, `Unsupported`. `Closed` if this side has disconnected the peer or
    /// closed the fabric. With [`ReconnectPolicy::OFF`], and once the handle is dropped, the reason why the connection
    /// ended.
    pub fn connected(&self) -> impl Future<Output = Result<Peer>> + Send + 'static {
        let state = Arc::clone(&self.0.state);
        async move { state.connected().await }
    }

    /// How often the handle has connected again. The first connection does not count.
    pub fn reconnects(&self) -> u64 {
        self.0.state.reconnects()
    }

    /// Sets a function to call once after each reconnect, with the new peer. The first connection does not count. A
    /// later call replaces the function.
    ///
    /// It is called when [`PeerHandle::peer`] already gives the new peer, on a helper thread of the control thread, so
    /// it may block. If [`FabricBuilder::control_on`](crate::FabricBuilder::control_on) has a runtime of one thread and
    /// the fabric is caller-driven, it is called on that thread. Calls follow each other: while one runs, a peer that
    /// dies is not connected again. A panic of the function is logged, and has no other effect.
    pub fn on_reconnect(&self, hook: impl Fn(&Peer) + Send + Sync + 'static) {
        self.0.state.set_hook(Arc::new(hook));
    }

    /// A region that the peer has published as `name`, imported for the current connection, as by [`Peer::region`]. The
    /// handle remembers the name, and imports the region again after each reconnect. Then call this function again: a
    /// `RemoteRegion` belongs to the connection that it was imported for.
    ///
    /// If the peer has not published the name again when it is back, the next call looks it up once more.
    ///
    /// # Errors
    /// Those of [`PeerHandle::peer`] and of [`Peer::region`].
    pub fn region(&self, name: &str) -> impl Future<Output = Result<RemoteRegion>> + Send + 'static {
        let (state, name) = (Arc::clone(&self.0.state), name.to_owned());
        async move {
            let peer = state.peer()?;
            if let Some(region) = state.names.region(&name, peer.id()) {
                return Ok(region);
            }
            let region = peer.region(&name).await?;
            state.names.add_region(name, &region);
            Ok(region)
        }
    }

    /// A catalogue that the peer has published as `name`, as by [`Peer::catalogue`]. The handle remembers the name, as
    /// [`PeerHandle::region`] does. After a reconnect it reads the new catalogue, and imports those regions, by their
    /// numbers, that were found in the former one.
    ///
    /// # Errors
    /// Those of [`PeerHandle::peer`] and of [`Peer::catalogue`].
    pub fn catalogue(
        &self,
        name: &str,
    ) -> impl Future<Output = Result<Arc<RemoteCatalogue>>> + Send + 'static {
        let (state, name) = (Arc::clone(&self.0.state), name.to_owned());
        async move {
            let peer = state.peer()?;
            if let Some(catalogue) = state.names.catalogue(&name, peer.id()) {
                return Ok(catalogue);
            }
            let catalogue = Arc::new(peer.catalogue(&name).await?);
            state.names.add_catalogue(name, &catalogue);
            Ok(catalogue)
        }
    }

    /// Prepares a paged write, as [`Peer::prepare_write_pages`] does, that can be made anew after a reconnect.
    ///
    /// # Errors
    /// Those of [`PeerHandle::peer`] and of [`Peer::prepare_write_pages`].
    pub fn prepare_write_pages(
        &self,
        src: &Region,
        from: impl Into<Pages>,
        dst: &RemoteRegion,
        to: impl Into<Pages>,
        page: usize,
        options: &WriteOptions,
    ) -> Result<RebindableTransfer> {
        let (src, from, to, options) = (src.clone(), from.into(), to.into(), options.clone());
        let mut dst = self.named(dst);
        self.rebindable(move |peer, names| {
            let remote = names.resolve(&mut dst, peer)?;
            peer.prepare_write_pages(&src, &from, remote, &to, page, &options)
        })
    }

    /// Prepares a paged read, as [`Peer::prepare_read_pages`] does, that can be made anew after a reconnect.
    ///
    /// # Errors
    /// Those of [`PeerHandle::peer`] and of [`Peer::prepare_read_pages`].
    pub fn prepare_read_pages(
        &self,
        dst: &Region,
        to: impl Into<Pages>,
        src: &RemoteRegion,
        from: impl Into<Pages>,
        page: usize,
        options: &ReadOptions,
    ) -> Result<RebindableTransfer> {
        let (dst, to, from, options) = (dst.clone(), to.into(), from.into(), options.clone());
        let mut src = self.named(src);
        self.rebindable(move |peer, names| {
            let remote = names.resolve(&mut src, peer)?;
            peer.prepare_read_pages(&dst, &to, remote, &from, page, &options)
        })
    }

    /// Prepares a write of a list, as [`Peer::prepare_write_list`] does, that can be made anew after a reconnect.
    ///
    /// # Errors
    /// Those of [`PeerHandle::peer`] and of [`Peer::prepare_write_list`].
    pub fn prepare_write_list<'a>(
        &self,
        local: &LocalList,
        local_selection: impl Into<Selection<'a>>,
        remote: &RemoteList,
        remote_selection: impl Into<Selection<'a>>,
        options: &WriteOptions,
    ) -> Result<RebindableTransfer> {
        let (local, options) = (local.clone(), options.clone());
        let selections = (local_selection.into().to_owned(), remote_selection.into().to_owned());
        let mut remote = self.named_list(remote);
        self.rebindable(move |peer, names| {
            let remote = names.resolve_list(&mut remote, peer)?;
            peer.prepare_write_list(&local, &selections.0, remote, &selections.1, &options)
        })
    }

    /// Prepares a read of a list, as [`Peer::prepare_read_list`] does, that can be made anew after a reconnect.
    ///
    /// # Errors
    /// Those of [`PeerHandle::peer`] and of [`Peer::prepare_read_list`].
    pub fn prepare_read_list<'a>(
        &self,
        local: &LocalList,
        local_selection: impl Into<Selection<'a>>,
        remote: &RemoteList,
        remote_selection: impl Into<Selection<'a>>,
        options: &ReadOptions,
    ) -> Result<RebindableTransfer> {
        let (local, options) = (local.clone(), options.clone());
        let selections = (local_selection.into().to_owned(), remote_selection.into().to_owned());
        let mut remote = self.named_list(remote);
        self.rebindable(move |peer, names| {
            let remote = names.resolve_list(&mut remote, peer)?;
            peer.prepare_read_list(&local, &selections.0, remote, &selections.1, &options)
        })
    }

    fn named(&self, region: &RemoteRegion) -> Named<RemoteRegion> {
        Named { names: vec![self.0.state.names.name_of(region)], value: region.clone() }
    }

    fn named_list(&self, list: &RemoteList) -> Named<RemoteList> {
        let names = list.regions().iter().map(|region| self.0.state.names.name_of(region)).collect();
        Named { names, value: list.clone() }
    }

    /// A transfer that `recipe` makes for each connection.
    fn rebindable(
        &self,
        recipe: impl FnMut(&Peer, &NamedRegions) -> Result<PreparedTransfer> + Send + 'static,
    ) -> Result<RebindableTransfer> {
        RebindableTransfer::new(&self.0.state, Box::new(recipe))
    }
}

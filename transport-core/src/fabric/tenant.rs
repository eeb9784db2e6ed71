//! Tenants: fabrics behind one listener, each with peers and memory of its own.
//!
//! A tenant is a protection domain. It opens the same devices as its parent once more. So it has its own domains,
//! endpoints, keys and worker threads, and its own regions, published names, peers and counters. It shares the parent's
//! listener and control thread. The token alone decides which tenant a peer belongs to: the peer is admitted to the
//! fabric, parent or tenant, whose token verifies its proof.
//!
//! - A peer of one tenant cannot use names, descriptors or keys of another tenant or of the parent. Its lookups find
//!   only the names of its own tenant. The incarnations differ, so an import is refused. A forged key is looked up in
//!   the tables of its own tenant's domains.
//! - Tenants share the process: its memory limit, its processors, its network links.
//! - Tenants do not protect processes of one user on one host from each other: `docs/trust.md`.
//!
//! Closing the parent closes its tenants. When a tenant is closed or dropped, its peers end, and its token admits
//! nobody any more.

use std::sync::{Arc, Mutex, Weak};

use super::{Fabric, FabricBuilder, FabricInner, lock};
use crate::control::{ControlThread, MAX_NAME, Token};
use crate::{Error, ErrorKind, Result};

/// The difference between the seeds, and between the incarnations, of successive tenants if the parent's are given.
const STRIDE: u64 = 0x9e37_79b9_7f4a_7c15;

/// The parent and the tenants of a fabric.
pub(super) struct Tenancy {
    /// The tenant's name. Empty for a fabric that is no tenant.
    pub name: Arc<str>,
    parent: Option<Weak<FabricInner>>,
    /// The settings that the fabric was opened with.
    builder: FabricBuilder,
    tenants: Mutex<Vec<Weak<FabricInner>>>,
    /// The number of tenants opened so far. Locked while a tenant is opened, which may take some time.
    opened: Mutex<u64>,
}

impl Tenancy {
    /// The tenancy of a fabric that is no tenant.
    pub fn root(builder: &FabricBuilder) -> Self {
        Self::new("", None, builder)
    }

    fn new(name: &str, parent: Option<Weak<FabricInner>>, builder: &FabricBuilder) -> Self {
        let (builder, tenants, opened) = (builder.clone(), Mutex::default(), Mutex::default());
        Self { name: name.into(), parent, builder, tenants, opened }
    }
}

impl Fabric {
    /// Opens a tenant of this fabric: a fabric of its own behind the same listener, for the peers that have `token`.
    ///
    /// The tenant is opened with this fabric's transports and settings. Its peers arrive at the parent's
    /// [`Listener`](crate::Listener), where [`Peer::tenant`](crate::Peer::tenant) gives the name of the peer's tenant.
    /// The tenant's own [`Fabric::connect`] proves `token`. A tenant cannot listen. To end it, close it or drop its
    /// last clone.
    ///
    /// # Errors
    /// `InvalidRequest` if the parent has no token or is a tenant itself, if the name is empty or longer than 255
    /// bytes, or if another fabric of this parent has the name or the token; otherwise as [`FabricBuilder::open`].
    pub fn tenant(&self, name: &str, token: Token) -> Result<Self> {
        let parent = &self.0;
        parent.check_open("open a tenant")?;
        let refuse = |why: String| Err(Error::new(ErrorKind::InvalidRequest, "open a tenant", why));
        if parent.tenancy.parent.is_some() {
            return refuse("a tenant has no tenants: open them all from its parent".into());
        }
        if name.is_empty() || name.len() > MAX_NAME {
            return refuse(format!("a name of {} bytes; 1 to {MAX_NAME} are allowed", name.len()));
        }
        let Some(own) = parent.token() else {
            let why =
                "the parent has no token, so anyone may be its peer: give it one by FabricBuilder::token";
            return refuse(why.into());
        };
        // Locked until the tenant is in the list, so that two tenants of one name cannot both pass the checks.
        let mut opened = lock(&parent.tenancy.opened);
        let live = parent.tenants();
        if live.iter().any(|tenant| *tenant.tenancy.name == *name) {
            return refuse(format!("there is a tenant {name:?} already: close it, or choose another name"));
        }
        if own.is(&token) || live.iter().filter_map(|tenant| tenant.token()).any(|other| other.is(&token)) {
            return refuse("the token is the parent's or another tenant's: make one for each".into());
        }
        *opened += 1;
        let offset = STRIDE.wrapping_mul(*opened);
        let builder = parent.tenancy.builder.clone().token(token).offset_by(offset);
        let tenancy = Tenancy::new(name, Some(Arc::downgrade(parent)), &builder);
        let tenant = builder.open_as(tenancy)?;
        let mut tenants = lock(&parent.tenancy.tenants);
        tenants.retain(|tenant| tenant.strong_count() > 0);
        tenants.push(Arc::downgrade(&tenant.0));
        drop(tenants);
        // If the parent was closed in the meantime, it may not have seen its new tenant.
        if let Err(error) = parent.check_open("open a tenant") {
            tenant.close();
            return Err(error);
        }
        Ok(tenant)
    }
}

impl FabricInner {
    /// The token that peers of this fabric must prove to have, if there is one.
    pub(crate) fn token(&self) -> Option<&Token> {
        self.tenancy.builder.token.as_ref()
    }

    /// The fabric's name as a tenant. Empty if it is no tenant.
    pub(crate) fn tenant_name(&self) -> &Arc<str> {
        &self.tenancy.name
    }

    /// The parent, if this fabric is a tenant and the parent is still open.
    pub(super) fn parent(&self) -> Option<Arc<Self>> {
        self.tenancy.parent.as_ref().and_then(Weak::upgrade)
    }

    /// Starts a control thread for this fabric. A tenant gets a branch of its `parent`'s thread.
    pub(super) fn start_control_thread(&self, parent: Option<&Self>) -> Result<ControlThread> {
        match (&self.tenancy.parent, parent) {
            (None, _) => {
                let FabricBuilder { control, caller_driven, .. } = &self.tenancy.builder;
                ControlThread::start(control.as_ref(), *caller_driven)
            }
            (Some(_), Some(parent)) => Ok(parent.control_thread("connect")?.branch()),
            (Some(_), None) => {
                Err(Error::new(ErrorKind::Closed, "connect", "the tenant's parent was closed"))
            }
        }
    }

    /// Refuses to listen on a tenant: its peers arrive at the parent's listener.
    pub(super) fn check_may_listen(&self) -> Result<()> {
        match self.tenancy.parent {
            None => Ok(()),
            Some(_) => {
                let why = "a tenant's peers connect to its parent's listener: listen there";
                Err(Error::new(ErrorKind::InvalidRequest, "listen", why))
            }
        }
    }

    pub(super) fn close_tenants(&self) {
        let tenants = std::mem::take(&mut *lock(&self.tenancy.tenants));
        tenants.iter().filter_map(Weak::upgrade).for_each(|tenant| tenant.close());
    }

    /// The tenants that are open.
    pub(super) fn tenants(&self) -> Vec<Arc<Self>> {
        let all: Vec<_> = lock(&self.tenancy.tenants).iter().filter_map(Weak::upgrade).collect();
        all.into_iter().filter(|tenant| tenant.check_open("").is_ok()).collect()
    }
}

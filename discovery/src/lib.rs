//! Directories of multirail peers, and groups that follow them.
//!
//! In reading order:
//!
//! - [`Member`]: a process as a directory lists it, and the limits of what a directory may say.
//! - [`Directory`]: join, look up, watch. [`open`] opens one by its URL.
//! - [`Membership`]: this process as a member, whose lease a task renews.
//! - [`Watch`]: the changes of the members, also through outages of the directory.
//! - [`ElasticGroup`]: connected peers that follow a directory, in [epochs](Epoch).
//! - [`Store`], [`StoreDirectory`]: what a directory keeps its members in; implement `Store` for another.
//!
//! ```
//! # use std::time::Duration;
//! # pollster::block_on(async {
//! use multirail_discovery::{Event, Member, open};
//!
//! # let folder = tempfile::tempdir().unwrap();
//! # let url = format!("file://{}/fleet", folder.path().display());
//! let directory = open(&url)?;
//! let fabric = multirail::open()?;
//! let listener = fabric.listen("127.0.0.1:0").await?;
//! let member = Member::new("decode-0", fabric.incarnation()).address(listener.local_addr());
//! let membership = directory.join(member, Duration::from_secs(5)).await?;
//!
//! let mut watch = directory.watch();
//! assert!(matches!(watch.next().await, Event::Joined(member) if member.name == "decode-0"));
//! assert_eq!(directory.lookup("decode-0").await?.addresses, [listener.local_addr()]);
//! membership.leave().await?;
//! # Ok::<(), multirail::Error>(())
//! # })?;
//! # Ok::<(), multirail::Error>(())
//! ```
//!
//! # Threads
//! One thread per process runs the tasks of all directories, while there is one. Any executor may poll the futures.
//!
//! # Cleanup
//! Dropping a [`Membership`] removes its entry; dropping a [`Watch`] or an [`ElasticGroup`] ends its tasks. The drop of
//! the last of them waits up to a second for entries that are being removed.

#![deny(unsafe_code)]

mod backoff;
mod directory;
#[cfg(feature = "dns")]
mod dns;
mod elastic;
#[cfg(feature = "etcd")]
mod etcd;
#[cfg(feature = "file")]
mod file;
mod hash;
mod join_all;
#[cfg(feature = "kubernetes")]
mod kubernetes;
mod member;
mod member_address;
mod membership;
#[cfg(feature = "redis")]
mod redis;
mod runtime;
mod store;
mod store_directory;
mod url;
mod watch;

pub use directory::Directory;
#[cfg(feature = "dns")]
pub use dns::DnsStore;
pub use elastic::{ConnectedMember, ElasticGroup, ElasticOptions, Epoch};
#[cfg(feature = "etcd")]
pub use etcd::EtcdStore;
#[cfg(feature = "file")]
pub use file::{FolderStore, StaticList};
#[cfg(feature = "kubernetes")]
pub use kubernetes::KubernetesStore;
pub use member::{
    Listing, MAX_ADDRESS, MAX_ADDRESSES, MAX_ATTRIBUTES, MAX_LEASE, MAX_MEMBERS, MAX_NAME, MAX_RECORD, Member,
};
pub use member_address::MemberAddress;
pub use membership::{Membership, MembershipState};
#[cfg(feature = "redis")]
pub use redis::RedisStore;
pub use store::{Changes, Claim, Lease, NoChanges, REQUEST_LIMIT, Renewal, Store};
pub use store_directory::StoreDirectory;
pub use url::open;
pub use watch::{Event, Watch};

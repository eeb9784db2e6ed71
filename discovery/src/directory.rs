//! What every directory offers.

use std::time::Duration;

use async_trait::async_trait;
use multirail::Result;

use crate::{Member, Membership, Watch};

/// A list of the members of a fleet, which all of them can read.
///
/// Any executor may poll the futures. A request ends within 2 s, with an error if the directory does not answer.
#[async_trait]
pub trait Directory: Send + Sync {
    /// The directory's URL, without passwords.
    fn url(&self) -> &str;

    /// Lists this process as `member`, until the returned membership is dropped. A task renews the entry each third of
    /// `lease`. When the process dies, the directory removes the entry after `lease`.
    ///
    /// A member of the same name is replaced: a process that was restarted does not wait until its former entry ends.
    ///
    /// # Errors
    /// `InvalidRequest` if the member is not within the limits, or the lease is not 1 s to 24 h; `Unsupported` if the
    /// directory cannot be joined; `Unreachable`, `DeadlineExceeded`, `Io`.
    async fn join(&self, member: Member, lease: Duration) -> Result<Membership>;

    /// The member of this name. Its entry may be as old as its lease.
    ///
    /// # Errors
    /// `NotFound` if there is none; `Unreachable`, `DeadlineExceeded`, `Io`.
    async fn lookup(&self, name: &str) -> Result<Member>;

    /// All members, sorted by their names. Entries that are not valid are left out, with a warning.
    ///
    /// # Errors
    /// `Unreachable`, `DeadlineExceeded`, `Io`.
    async fn members(&self) -> Result<Vec<Member>>;

    /// Begins to watch the members.
    fn watch(&self) -> Watch;
}

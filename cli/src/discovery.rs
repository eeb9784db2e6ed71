//! Directories on the command line: `serve` joins one, `send` looks a server up.

use std::sync::Arc;
#[cfg(feature = "directories")]
use std::{net::SocketAddr, time::Duration};

use multirail::{AddressSource, Fabric};
#[cfg(feature = "directories")]
use multirail::{Result, wait};
#[cfg(feature = "directories")]
use multirail_discovery::{Member, MemberAddress, Membership};

#[cfg(feature = "directories")]
use crate::failure::CommandFailure;
use crate::failure::CommandResult;

/// How long a directory may take. Its own limits are shorter.
#[cfg(feature = "directories")]
const LIMIT: Duration = Duration::from_secs(10);
/// The lease of a server.
#[cfg(feature = "directories")]
const LEASE: Duration = Duration::from_secs(10);

/// The directory that `send` looks the server up in.
#[derive(clap::Args, Clone, Default)]
pub struct LookupOptions {
    /// Take --to as the name of a member of this directory: file:///PATH, etcd://HOST:PORT/PREFIX or
    /// redis://HOST:PORT/PREFIX; dns:// and k8s:// if the command was built with them
    #[cfg(feature = "directories")]
    #[arg(long, value_name = "URL")]
    directory: Option<String>,
}

impl LookupOptions {
    /// Where the server is that was given as `to`.
    #[cfg(feature = "directories")]
    pub fn source(&self, to: &str) -> CommandResult<Arc<dyn AddressSource>> {
        Ok(match &self.directory {
            Some(url) => Arc::new(MemberAddress::new(multirail_discovery::open(url)?, to)),
            None => Arc::new(to.to_owned()),
        })
    }

    #[cfg(not(feature = "directories"))]
    pub fn source(&self, to: &str) -> CommandResult<Arc<dyn AddressSource>> {
        Ok(Arc::new(to.to_owned()))
    }
}

/// The directory that `serve` joins.
#[derive(clap::Args, Clone, Default)]
pub struct JoinOptions {
    /// Join this directory as --name, so that `send --to NAME --directory URL` finds the server: file:///PATH,
    /// etcd://HOST:PORT/PREFIX or redis://HOST:PORT/PREFIX
    #[cfg(feature = "directories")]
    #[arg(long, value_name = "URL", requires = "name")]
    directory: Option<String>,

    /// The server's name in the directory
    #[cfg(feature = "directories")]
    #[arg(long, value_name = "NAME", requires = "directory")]
    name: Option<String>,
}

/// A server in a directory, until this is dropped.
pub struct Joined {
    #[cfg(feature = "directories")]
    _membership: Option<Membership>,
}

impl JoinOptions {
    /// Joins the directory, if one is given, as a server that listens at `address`.
    #[cfg(feature = "directories")]
    pub fn join(&self, fabric: &Fabric, address: &str) -> CommandResult<Joined> {
        let (Some(url), Some(name)) = (&self.directory, &self.name) else {
            return Ok(Joined { _membership: None });
        };
        if address.parse::<SocketAddr>().is_ok_and(|address| address.ip().is_unspecified()) {
            return Err(CommandFailure::new(format!(
                "nobody can connect to {address}: with --directory, let --listen name an address of this host"
            )));
        }
        let member =
            Member::new(name, fabric.incarnation()).address(address).attribute("service", "multirail-serve");
        let directory = multirail_discovery::open(url)?;
        Ok(Joined { _membership: Some(ask(directory.join(member, LEASE))?) })
    }

    #[cfg(not(feature = "directories"))]
    pub fn join(&self, _fabric: &Fabric, _address: &str) -> CommandResult<Joined> {
        Ok(Joined {})
    }
}

/// Awaits the answer of a directory.
#[cfg(feature = "directories")]
pub fn ask<T>(request: impl Future<Output = Result<T>>) -> CommandResult<T> {
    let late = |_| CommandFailure::new(format!("the directory did not answer within {} s", LIMIT.as_secs()));
    Ok(wait(request, LIMIT).map_err(late)??)
}

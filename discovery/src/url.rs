//! Opening a directory by its URL.

use std::sync::Arc;

use multirail::{Error, ErrorKind, Result};

use crate::Directory;

/// Opens the directory at `url`. Does not ask it anything yet.
///
/// | URL | directory | feature |
/// |---|---|---|
/// | `file:///PATH` | a folder on a shared file system; a static list if the path ends with `.json` or `.toml` | `file` |
/// | `etcd://HOST:PORT[,HOST:PORT...]/PREFIX` | keys below a prefix in etcd | `etcd` |
/// | `redis://[USER:PASSWORD@]HOST:PORT[/DATABASE]/PREFIX` | keys below a prefix in Redis | `redis` |
/// | `dns://[SERVER:PORT/]_PORT._tcp.SERVICE` | SRV records | `dns` |
/// | `dns://[SERVER:PORT/]NAME:PORT` | A and AAAA records | `dns` |
/// | `k8s://NAMESPACE/SERVICE[:PORT-NAME][?api=http://HOST:PORT]` | EndpointSlices, by Kubernetes' API | `kubernetes` |
///
/// # Errors
/// `InvalidRequest` if it is no URL of a directory; `Unsupported` if the library was built without its feature.
pub fn open(url: &str) -> Result<Arc<dyn Directory>> {
    let Some((scheme, rest)) = url.split_once("://") else {
        return Err(refused(format!("{url:?} is no URL of a directory: it begins with {SCHEMES}")));
    };
    match scheme {
        #[cfg(feature = "file")]
        "file" => open_file(rest),
        #[cfg(not(feature = "file"))]
        "file" => Err(missing("file")),
        #[cfg(feature = "dns")]
        "dns" => Ok(Arc::new(crate::StoreDirectory::new(crate::DnsStore::new(rest)?)?)),
        #[cfg(not(feature = "dns"))]
        "dns" => Err(missing("dns")),
        #[cfg(feature = "etcd")]
        "etcd" => Ok(Arc::new(crate::StoreDirectory::new(crate::EtcdStore::new(rest)?)?)),
        #[cfg(not(feature = "etcd"))]
        "etcd" => Err(missing("etcd")),
        #[cfg(feature = "kubernetes")]
        "k8s" => Ok(Arc::new(crate::StoreDirectory::new(crate::KubernetesStore::new(rest)?)?)),
        #[cfg(not(feature = "kubernetes"))]
        "k8s" => Err(missing("kubernetes")),
        #[cfg(feature = "redis")]
        "redis" => Ok(Arc::new(crate::StoreDirectory::new(crate::RedisStore::new(rest)?)?)),
        #[cfg(not(feature = "redis"))]
        "redis" => Err(missing("redis")),
        _ => Err(refused(format!("{scheme}:// is no directory; there are {SCHEMES}"))),
    }
}

const SCHEMES: &str = "file://, etcd://, redis://, dns://, k8s://";

#[cfg(feature = "file")]
fn open_file(path: &str) -> Result<Arc<dyn Directory>> {
    if !path.starts_with('/') {
        return Err(refused(format!("file://{path} has no absolute path: write file:///PATH")));
    }
    let is_list = path.ends_with(".json") || path.ends_with(".toml");
    Ok(match is_list {
        true => Arc::new(crate::StoreDirectory::new(crate::StaticList::new(path))?),
        false => Arc::new(crate::StoreDirectory::new(crate::FolderStore::new(path))?),
    })
}

#[cold]
fn refused(why: String) -> Error {
    Error::new(ErrorKind::InvalidRequest, "open a directory", why)
}

#[cold]
#[allow(dead_code, reason = "every feature may be on")]
fn missing(feature: &str) -> Error {
    let why = format!("this program was built without the feature {feature} of multirail-discovery");
    Error::new(ErrorKind::Unsupported, "open a directory", why)
}

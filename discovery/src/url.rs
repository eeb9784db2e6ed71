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
        let shown = without_secrets(url);
        return Err(refused(format!("{shown:?} is no URL of a directory: it begins with {SCHEMES}")));
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
        _ => Err(refused(format!("{}:// is no directory; there are {SCHEMES}", without_secrets(scheme)))),
    }
}

const SCHEMES: &str = "file://, etcd://, redis://, dns://, k8s://";

#[cfg(feature = "file")]
fn open_file(path: &str) -> Result<Arc<dyn Directory>> {
    if !path.starts_with('/') {
        let shown = without_secrets(path);
        return Err(refused(format!("file://{shown} has no absolute path: write file:///PATH")));
    }
    let is_list = path.ends_with(".json") || path.ends_with(".toml");
    Ok(match is_list {
        true => Arc::new(crate::StoreDirectory::new(crate::StaticList::new(path))?),
        false => Arc::new(crate::StoreDirectory::new(crate::FolderStore::new(path))?),
    })
}

/// A URL, or a part of one, as messages show it: without all that may be a user and a password.
pub(crate) fn without_secrets(url: &str) -> &str {
    url.rsplit_once('@').map_or(url, |(_, public)| public)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_show_no_password() {
        for url in [
            "redis:user:secret@h:1/fleet",
            "user:secret@h://x",
            "redis://user:secret@h:port/fleet",
            "redis://user:secret/secret@h:1/fleet",
            "redis://user:secret@secret@h:1/a//b",
            "redis://user:secret@h:1/a//b@c",
            "etcd://user:secret@h:1/fleet",
            "etcd://user:secret/secret@h:1/fleet",
            "etcd://h:1,user:secret@h:1/fleet",
            "dns://user:secret@h:1/x",
            "dns://user:secret@h:1",
            "k8s://user:secret@h/x",
            "k8s://a/b?api=http://user:secret@h",
            "file://user:secret@h/x",
        ] {
            let error = open(url).err().expect(url);
            let shown = format!("{error} {error:?}");
            assert!(!shown.contains("secret"), "{url}: {shown}");
        }
    }

    #[test]
    #[cfg(feature = "redis")]
    fn urls_show_no_password() {
        let directory = open("redis://user:sec%2Fret@h:1/fleet").unwrap();
        assert_eq!(directory.url(), "redis://h:1/0/fleet");
    }
}

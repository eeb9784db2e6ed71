//! Directories that a cluster keeps, against servers of this test: DNS over UDP, and Kubernetes' API over HTTP and TLS,
//! with answers written after the API's reference.

#[cfg(feature = "dns")]
mod dns;
#[cfg(feature = "kubernetes")]
mod kubernetes;

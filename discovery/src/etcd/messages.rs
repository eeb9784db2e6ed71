//! The messages of etcd's `rpc.proto` and `kv.proto`, with the fields that this crate uses. Written by hand, because
//! the compiler of protobuf would be needed to build multirail.
//!
//! A field of a `oneof` is an optional field here: the bytes are the same.

use prost::Message;

#[derive(Clone, PartialEq, Message)]
pub struct RangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub range_end: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub limit: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct RangeResponse {
    #[prost(message, repeated, tag = "2")]
    pub kvs: Vec<KeyValue>,
    #[prost(bool, tag = "3")]
    pub more: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct KeyValue {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub mod_revision: i64,
    #[prost(bytes = "vec", tag = "5")]
    pub value: Vec<u8>,
}

/// Writes a key, in a transaction.
#[derive(Clone, PartialEq, Message)]
pub struct PutRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub value: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub lease: i64,
}

/// A response without fields that are read.
#[derive(Clone, PartialEq, Message)]
pub struct Done {}

#[derive(Clone, PartialEq, Message)]
pub struct Compare {
    /// 0 is `EQUAL`.
    #[prost(int32, tag = "1")]
    pub result: i32,
    /// 2 is `MOD`.
    #[prost(int32, tag = "2")]
    pub target: i32,
    #[prost(bytes = "vec", tag = "3")]
    pub key: Vec<u8>,
    #[prost(int64, optional, tag = "6")]
    pub mod_revision: Option<i64>,
}

impl Compare {
    /// The last change of the key was this revision. 0: the key does not exist.
    pub fn is_unchanged(key: &[u8], revision: i64) -> Self {
        Self { result: 0, target: 2, key: key.to_owned(), mod_revision: Some(revision) }
    }
}

#[derive(Clone, PartialEq, Message)]
pub struct RequestOp {
    #[prost(message, optional, tag = "2")]
    pub put: Option<PutRequest>,
}

#[derive(Clone, PartialEq, Message)]
pub struct TxnRequest {
    #[prost(message, repeated, tag = "1")]
    pub compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    pub success: Vec<RequestOp>,
}

#[derive(Clone, PartialEq, Message)]
pub struct TxnResponse {
    #[prost(bool, tag = "2")]
    pub succeeded: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct WatchRequest {
    #[prost(message, optional, tag = "1")]
    pub create: Option<WatchCreateRequest>,
}

#[derive(Clone, PartialEq, Message)]
pub struct WatchCreateRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub range_end: Vec<u8>,
}

/// The events are not read: a watch lists the keys after each response.
#[derive(Clone, PartialEq, Message)]
pub struct WatchResponse {
    #[prost(bool, tag = "3")]
    pub created: bool,
    #[prost(bool, tag = "4")]
    pub canceled: bool,
    #[prost(string, tag = "6")]
    pub cancel_reason: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct LeaseGrantRequest {
    #[prost(int64, tag = "1")]
    pub ttl: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct LeaseGrantResponse {
    #[prost(int64, tag = "2")]
    pub id: i64,
    #[prost(string, tag = "4")]
    pub error: String,
}

/// Of a lease that is kept alive, or revoked.
#[derive(Clone, PartialEq, Message)]
pub struct LeaseRequest {
    #[prost(int64, tag = "1")]
    pub id: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct LeaseKeepAliveResponse {
    /// 0 if the lease has ended.
    #[prost(int64, tag = "3")]
    pub ttl: i64,
}

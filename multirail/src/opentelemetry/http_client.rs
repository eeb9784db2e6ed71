//! The HTTP client of the exporter.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::{Request, Response};
use opentelemetry_http::{HttpClient, HttpError};
use ureq::Agent;

/// The most bytes of an answer, which says little: how many spans the collector has refused, and why.
const MAX_ANSWER: u64 = 64 << 10;

/// Speaks HTTP without TLS, and without a proxy. The exporter's own thread waits for the answer.
#[derive(Debug)]
pub(super) struct PlainHttp(Agent);

impl PlainHttp {
    /// A client whose requests take no longer than `limit`.
    pub fn new(limit: Duration) -> Self {
        let config =
            Agent::config_builder().timeout_global(Some(limit)).proxy(None).http_status_as_error(false);
        Self(config.build().into())
    }
}

#[async_trait]
impl HttpClient for PlainHttp {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (parts, body) = request.into_parts();
        let answer = self.0.run(Request::from_parts(parts, &body[..]))?;
        let (parts, mut body) = answer.into_parts();
        let bytes = body.with_config().limit(MAX_ANSWER).read_to_vec()?;
        Ok(Response::from_parts(parts, bytes.into()))
    }
}

//! The suite against libfabric's provider `tcp`, between processes, with one domain and with
//! four. Not yet against `shm`, which does not pass it (docs/efa.md).

use std::process::ExitCode;
use std::sync::Arc;

use backend_efa::{Efa, EfaConfig};
use conformance::{Shape, Subject, Tag, Variant};
use transport_core::TransportConfig;
use transport_core::spi::Backend;

struct Provider {
    name: String,
    provider: &'static str,
    rails: u32,
}

impl Subject for Provider {
    fn name(&self) -> &str {
        &self.name
    }

    fn rails(&self) -> u32 {
        self.rails
    }

    /// A clock that only the trial moves passes deadlines before a socket has carried a byte.
    fn takes(&self, tag: Tag) -> bool {
        tag == Tag::Process
    }

    fn transport(&self, label: &str, shape: Shape) -> Result<TransportConfig, String> {
        if shape.variant != Variant::Plain {
            return Err(format!("libfabric impersonates no {} device", shape.variant.name()));
        }
        let config = EfaConfig::default().provider(self.provider).domains(shape.rails);
        let backend = Efa::with(config.node("127.0.0.1"));
        let devices = backend.probe().map_err(|why| format!("{}; {}", why.reason, why.remedy))?;
        Ok(TransportConfig::new(label, Arc::new(backend)).devices(devices))
    }
}

fn main() -> ExitCode {
    let subject = |provider: &'static str, rails: u32| {
        let name = format!("{provider}-x{rails}");
        Arc::new(Provider { name, provider, rails }) as Arc<dyn Subject>
    };
    conformance::main(vec![subject("tcp", 1), subject("tcp", 4)])
}

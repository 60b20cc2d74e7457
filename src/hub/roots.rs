//! Trusted certificate authorities: those of a file named in the environment (companies use this), else those of the operating system, else
//! Mozilla's list, which is built in.

use crate::disk;
use crate::error::{Error, Result};
use std::path::{Path, PathBuf};
use ureq::tls::{Certificate, PemItem, RootCerts, parse_pem};

/// Environment variables that name a file of certificates for OpenSSL, Python's `requests` and curl. The first variable that is set is
/// used.
pub(super) const VARIABLES: [&str; 3] = ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"];
/// Certificate files of Debian and Alpine, Red Hat, SUSE, and other systems.
const SYSTEM: [&str; 5] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];
const BYTES_MAX: u64 = 64 << 20;

/// The trusted certificate authorities, and a description of their source for error messages.
pub(super) struct TrustRoots {
    pub(super) roots: RootCerts,
    pub(super) origin: String,
}

impl TrustRoots {
    /// Reads the certificate authorities that the environment selects.
    ///
    /// # Errors
    /// `Io` and `Format`, by name, for a file that cannot be read or holds no certificate.
    pub(super) fn of(variable: &dyn Fn(&str) -> Option<PathBuf>) -> Result<Self> {
        let named = VARIABLES.iter().find_map(|name| Some((format!("{name} "), variable(name)?)));
        let system = || SYSTEM.iter().map(PathBuf::from).find(|path| path.exists()).map(|path| (String::new(), path));
        match named.or_else(system) {
            Some((name, path)) => Ok(Self { roots: read(&path)?, origin: format!("{name}{}", path.display()) }),
            None => Ok(Self::built_in()),
        }
    }

    /// Mozilla's list of certificate authorities.
    pub(super) fn built_in() -> Self {
        Self { roots: RootCerts::WebPki, origin: "this program's own list".into() }
    }
}

fn read(path: &Path) -> Result<RootCerts> {
    let text = disk::read_small(path, BYTES_MAX)?;
    let mut certificates: Vec<Certificate<'static>> = Vec::new();
    for item in parse_pem(&text) {
        if let PemItem::Certificate(certificate) = item.map_err(|e| Error::format(path, e))? {
            certificates.push(certificate);
        }
    }
    if certificates.is_empty() {
        return Err(Error::format(path, "no certificate in PEM format (-----BEGIN CERTIFICATE-----)"));
    }
    Ok(RootCerts::new_with_certs(&certificates))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::client::{HttpFailure, HubClient, WaitLimits};
    use crate::hub::download_tests::hub_server::{HubServer, Reply};
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    use rustls::{ServerConfig, ServerConnection, StreamOwned};
    use std::io::{self, Read, Write};
    use std::net::{SocketAddr, TcpListener, TcpStream};
    use std::sync::Arc;
    use std::thread;

    fn golden(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tls").join(name)
    }

    /// Starts a TLS proxy in front of the hub at `plain`, with a certificate of `authority.pem`, and returns its endpoint. The proxy runs
    /// until the tests end.
    fn behind_tls(plain: SocketAddr) -> String {
        let certificate = CertificateDer::from_pem_file(golden("server.pem")).unwrap();
        let key = PrivateKeyDer::from_pem_file(golden("server-key.pem")).unwrap();
        let provider = rustls::crypto::ring::default_provider();
        let config = ServerConfig::builder_with_provider(provider.into()).with_safe_default_protocol_versions().unwrap();
        let config = Arc::new(config.with_no_client_auth().with_single_cert(vec![certificate], key).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("https://{}", listener.local_addr().unwrap());
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let connection = ServerConnection::new(config.clone()).unwrap();
                // A client that does not trust the certificate closes the connection.
                let _ = forward(StreamOwned::new(connection, stream), plain);
            }
        });
        endpoint
    }

    /// Forwards one request and its whole answer.
    fn forward(mut client: impl Read + Write, plain: SocketAddr) -> io::Result<()> {
        let (mut received, mut answer, mut byte) = (Vec::new(), Vec::new(), [0]);
        while !received.ends_with(b"\r\n\r\n") {
            client.read_exact(&mut byte)?;
            received.extend(byte);
        }
        let mut hub = TcpStream::connect(plain)?;
        hub.write_all(&received)?;
        hub.read_to_end(&mut answer)?;
        client.write_all(&answer)?;
        client.flush()
    }

    fn trusted(set: &[(&str, &Path)]) -> Result<TrustRoots> {
        TrustRoots::of(&|name| set.iter().find(|(variable, _)| *variable == name).map(|(_, path)| path.to_path_buf()))
    }

    #[test]
    fn a_hub_of_a_companys_authority_is_trusted_where_a_variable_names_it() {
        let (authority, server) = (golden("authority.pem"), HubServer::start(|_, _| Reply::ok(b"here".to_vec())));
        let endpoint = behind_tls(server.address);
        let get = |trusted: TrustRoots| HubClient::new(&endpoint, None, trusted, WaitLimits::default()).unwrap().get_bytes("/", 99);
        for name in VARIABLES {
            assert_eq!(get(trusted(&[(name, &authority)]).unwrap()).unwrap(), b"here", "{name}");
        }
        let first = [(VARIABLES[2], golden("none.pem")), (VARIABLES[0], authority)];
        assert!(get(trusted(&[(first[0].0, &first[0].1), (first[1].0, &first[1].1)]).unwrap()).is_ok());
        for trusted in [trusted(&[]).unwrap(), TrustRoots::built_in()] {
            let from = trusted.origin.clone();
            let Err(HttpFailure::Lasting(cause)) = get(trusted) else { panic!("nobody may trust it") };
            let message = format!("the certificate of {endpoint} is not signed by an authority in {from}; SSL_CERT_FILE can name a file");
            assert!(cause.contains(&message) && cause.contains("invalid peer certificate: UnknownIssuer"), "{cause}");
        }
    }

    #[test]
    fn a_file_that_is_none_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |path: &Path| trusted(&[("SSL_CERT_FILE", path)]).err().unwrap().to_string();
        assert!(refused(&golden("none.pem")).contains("none.pem: No such file"));
        assert!(refused(&golden("server-key.pem")).ends_with("server-key.pem: no certificate in PEM format (-----BEGIN CERTIFICATE-----)"));
        let broken = dir.path().join("broken.pem");
        std::fs::write(&broken, "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n").unwrap();
        assert!(refused(&broken).contains("broken.pem: "), "{}", refused(&broken));
        let words = trusted(&[("CURL_CA_BUNDLE", &golden("authority.pem"))]).unwrap().origin;
        assert!(words.starts_with("CURL_CA_BUNDLE ") && words.ends_with("authority.pem"), "{words}");
    }
}

//! A Pubky network for tests, in two processes, so that the homeserver alone can be stopped,
//! killed and started again with the same data:
//!
//! `hpkfs-testnet network` runs the DHT, the relays, the way in to the homeserver, and answers
//! requests on its standard input; `hpkfs-testnet homeserver DIR` runs the homeserver, whose
//! configuration is `DIR/config.toml`. Both end when their standard input does.

mod door;
mod signer;

use std::io::Write as _;
use std::path::PathBuf;

use anyhow::{Context as _, bail};
use pubky_homeserver::{HomeserverApp, PersistentDataDir};
use pubky_testnet::Testnet;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};

const DHT_PORT: u16 = 6881;
const PKARR_RELAY_PORT: u16 = 15411;
const HTTP_RELAY_PORT: u16 = 15412;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["network"] => network().await,
        ["homeserver", folder] => homeserver(folder.into()).await,
        _ => bail!("usage: hpkfs-testnet network | homeserver DIR"),
    }
}

fn tell(line: &str) {
    println!("{line}");
    let _ = std::io::stdout().flush();
}

async fn network() -> anyhow::Result<()> {
    let testnet = Testnet::new().await?;
    let nodes = testnet.dht_bootstrap_nodes();
    let nodes: Vec<String> = nodes.iter().map(ToString::to_string).collect();
    // Its first node takes the usual port, if that is free.
    let has_fixed = nodes
        .iter()
        .any(|node| node.ends_with(&format!(":{DHT_PORT}")));
    let _fixed = if has_fixed {
        None
    } else {
        let mut fixed = mainline::Dht::builder();
        fixed.port(DHT_PORT).bootstrap(&nodes).server_mode();
        Some(fixed.build().context("the DHT")?)
    };
    let storage = tempfile::tempdir()?;
    let mut relay = pkarr_relay::Relay::builder();
    relay
        .http_port(PKARR_RELAY_PORT)
        .storage(storage.path().to_path_buf())
        .disable_rate_limiter()
        .report_policy(pkarr::dht::ReportPolicy::testnet())
        .dht(|config| {
            config.bootstrap = Some(nodes.iter().filter_map(|node| node.parse().ok()).collect());
            config
        });
    // SAFETY: the relay's storage is a memory map that nobody else opens.
    let _pkarr_relay = unsafe { relay.run() }.await.context("the pkarr relay")?;
    let _http_relay = http_relay::HttpRelay::builder()
        .http_port(HTTP_RELAY_PORT)
        .run()
        .await
        .context("the HTTP relay")?;
    let door = door::open().await.context("the way to the homeserver")?;
    let mut signer = signer::Signer::new(&testnet, door)?;
    tell(r#"{"ready":true}"#);
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    while let Some(line) = lines.next_line().await? {
        tell(&signer.answer(&line).await);
    }
    Ok(())
}

async fn homeserver(folder: PathBuf) -> anyhow::Result<()> {
    let _running =
        HomeserverApp::start_with_persistent_data_dir(PersistentDataDir::new(folder)).await?;
    tell(r#"{"ready":true}"#);
    let mut rest = Vec::new();
    tokio::io::stdin().read_to_end(&mut rest).await?;
    Ok(())
}

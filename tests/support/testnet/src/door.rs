//! The way in to the homeserver: ends its TLS, which needs its key, and passes plain HTTP on.
//!
//! By default straight to the homeserver; on request to a proxy that injects faults.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

/// What the homeserver's record names as its port.
const DOOR_PORT: u16 = 6297;
const HOMESERVER_HTTP_PORT: u16 = 6286;

/// Where connections are led; changing it ends those that are there.
pub type Door = watch::Sender<u16>;

pub async fn open() -> anyhow::Result<Door> {
    let homeserver = pkarr::Keypair::from_secret_key(&[0; 32]);
    let acceptor = TlsAcceptor::from(Arc::new(homeserver.to_rpk_rustls_server_config()));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, DOOR_PORT)).await?;
    let door = watch::Sender::new(HOMESERVER_HTTP_PORT);
    let target = door.subscribe();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(lead(client, acceptor.clone(), target.clone()));
        }
    });
    Ok(door)
}

async fn lead(client: TcpStream, acceptor: TlsAcceptor, mut target: watch::Receiver<u16>) {
    let port = *target.borrow_and_update();
    let _ = client.set_nodelay(true);
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let (Ok(client), Ok(server)) =
        tokio::join!(acceptor.accept(client), TcpStream::connect(address))
    else {
        return;
    };
    let _ = server.set_nodelay(true);
    let (mut from_client, mut to_client) = tokio::io::split(client);
    let (mut from_server, mut to_server) = tokio::io::split(server);
    let up = async {
        // A homeserver may answer and close before it has read all; its answer still goes down.
        let _ = tokio::io::copy(&mut from_client, &mut to_server).await;
        let _ = to_server.shutdown().await;
        std::future::pending::<()>().await;
    };
    let down = async {
        let _ = tokio::io::copy(&mut from_server, &mut to_client).await;
        let _ = to_client.shutdown().await;
    };
    tokio::select! {
        () = up => {}
        () = down => {}
        _ = target.changed() => {}
    }
}

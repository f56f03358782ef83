//! Users, and what their signer app does: one JSON object a line in, one out.

use std::collections::HashMap;

use anyhow::{Context as _, anyhow, bail};
use pubky::{
    AuthFlowKind, Capabilities, ClientId, GrantManager, Keypair, Pubky, PubkyGrantAuthFlow,
    PubkySigner, PublicKey,
};
use pubky_testnet::Testnet;
use serde_json::{Value, json};

use crate::door::Door;

const RELAY: &str = "http://127.0.0.1:15412/inbox/";

pub struct Signer {
    sdk: Pubky,
    homeserver: PublicKey,
    users: HashMap<String, PubkySigner>,
    door: Door,
}

impl Signer {
    pub fn new(testnet: &Testnet, door: Door) -> anyhow::Result<Self> {
        Ok(Self {
            sdk: testnet.sdk()?,
            homeserver: Keypair::from_secret(&[0; 32]).public_key(),
            users: HashMap::new(),
            door,
        })
    }

    pub async fn answer(&mut self, line: &str) -> String {
        let told = match serde_json::from_str(line) {
            Ok(request) => self.act(&request).await,
            Err(error) => Err(error.into()),
        };
        told.unwrap_or_else(|error| json!({ "error": format!("{error:#}") }))
            .to_string()
    }

    async fn act(&mut self, request: &Value) -> anyhow::Result<Value> {
        let text = |name: &str| {
            let value = request[name].as_str();
            value.with_context(|| format!("{name} is missing"))
        };
        match text("op")? {
            "new-user" => {
                let signer = self.sdk.signer(Keypair::random());
                signer.signup(&self.homeserver, None).await?;
                let owner = signer.public_key().z32();
                self.users.insert(owner.clone(), signer);
                Ok(json!({ "owner": owner }))
            }
            "approve" => {
                let signer = self.user(text("owner")?)?;
                match request["capabilities"].as_str() {
                    Some(narrowed) => {
                        let narrowed = narrowed.parse()?;
                        signer
                            .approve_auth_with_capabilities(text("url")?, &narrowed)
                            .await?;
                    }
                    None => signer.approve_auth(text("url")?).await?,
                }
                Ok(json!({}))
            }
            "grant" => {
                let signer = self.user(text("owner")?)?;
                let capabilities: Capabilities = text("capabilities")?.parse()?;
                let client_id = ClientId::new("hermes.pubky.app").map_err(|e| anyhow!("{e}"))?;
                let flow =
                    PubkyGrantAuthFlow::builder(&capabilities, AuthFlowKind::signin(), client_id)
                        .client(self.sdk.client().clone())
                        .relay(RELAY.parse()?)
                        .start()?;
                signer.approve_auth(flow.authorization_url()).await?;
                let session = flow.await_approval().await?;
                let view = session.as_grant().context("a grant's session")?;
                let grant = view
                    .export_local_secret()
                    .await
                    .context("an exported grant")?;
                Ok(json!({ "grant": grant }))
            }
            "revoke-all" => {
                let signer = self.user(text("owner")?)?;
                let client_id = ClientId::new("tests").map_err(|e| anyhow!("{e}"))?;
                let root = signer.signin_blocking(client_id).await?;
                let manager = GrantManager::new(&root);
                let mut revoked = 0;
                for grant in manager.list().await? {
                    if manager.revoke(&grant.grant_id).await.is_ok() {
                        revoked += 1;
                    }
                }
                Ok(json!({ "revoked": revoked }))
            }
            "door" => {
                let port = request["port"]
                    .as_u64()
                    .and_then(|port| u16::try_from(port).ok());
                self.door.send_replace(port.context("port is missing")?);
                Ok(json!({}))
            }
            other => bail!("there is no op {other}"),
        }
    }

    fn user(&self, owner: &str) -> anyhow::Result<&PubkySigner> {
        self.users.get(owner).context("an unknown user")
    }
}

//! `kvsluice chaos`: real processes, killed from outside and from within, and an account that must balance.

#[cfg(test)]
mod arena;
#[cfg(test)]
mod deaths;
#[cfg(test)]
mod kills;

//! Peers that do whatever they can (X33): each is a process of its own that attaches for real, or never gets that far.

#[cfg(test)]
mod peers;
#[cfg(test)]
mod producer;
#[cfg(test)]
mod second;
#[cfg(test)]
mod worker;

//! How the program takes notifications.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_core::Stream;

use super::{Notification, Notifier, no_notifications};
use crate::{Error, ErrorKind, Fabric, Result, wait};

/// The notifications of all peers, from [`Fabric::notifications`]: those of one peer in the order in which it sent them.
/// It is a [`Stream`]; [`next`](Self::next) needs no stream trait in scope.
///
/// All handles of one fabric take from the same notifications. What nobody has taken stays, also if all handles are
/// dropped.
#[must_use = "streams do nothing unless polled"]
pub struct Notifications {
    fabric: Fabric,
    /// The key of this stream's waker in the set of wakers.
    id: Option<u64>,
    /// Whether the stream has returned its last error.
    has_ended: bool,
}

impl Notifications {
    /// The notifications of a fabric that was opened with them.
    pub(crate) fn new(fabric: &Fabric) -> Result<Self> {
        fabric.0.check_open("notifications")?;
        if fabric.0.notifier().is_none() {
            return Err(no_notifications("notifications"));
        }
        Ok(Self { fabric: fabric.clone(), id: None, has_ended: false })
    }

    /// Waits for the next notification.
    ///
    /// # Errors
    /// The future returns `Closed` once the fabric is closed, or `DeviceLost` once no transport's device is left, and all
    /// notifications are taken.
    #[expect(clippy::should_implement_trait, reason = "named as that of streams, and of `RecvPool`")]
    pub fn next(&mut self) -> NextNotification<'_> {
        NextNotification(self)
    }

    /// The next notification, if it has arrived; `Closed` once the fabric is closed and all are taken.
    pub fn try_next(&mut self) -> Option<Result<Notification>> {
        let next = self.notifier()?.inbox.try_next(&*self.fabric.0);
        next.or_else(|| self.fabric.0.check_open("notifications").err().map(Err))
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Notification>> {
        match self.fabric.0.notifier() {
            Some(notifier) => notifier.inbox.poll_next(&*self.fabric.0, &mut self.id, context.waker()),
            None => Poll::Pending,
        }
    }

    fn notifier(&self) -> Option<&Notifier> {
        self.fabric.0.notifier()
    }
}

impl Stream for Notifications {
    type Item = Result<Notification>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        if this.has_ended {
            return Poll::Ready(None);
        }
        let polled = this.poll(context);
        let is_last = |error: &Error| matches!(error.kind(), ErrorKind::Closed | ErrorKind::DeviceLost);
        this.has_ended = matches!(&polled, Poll::Ready(Err(error)) if is_last(error));
        polled.map(Some)
    }
}

impl Drop for Notifications {
    fn drop(&mut self) {
        if let Some(notifier) = self.fabric.0.notifier() {
            notifier.inbox.forget(&mut self.id);
        }
    }
}

/// The future of [`Notifications::next`]. If it is dropped before it resolves, it has taken nothing.
#[must_use = "futures do nothing unless awaited"]
pub struct NextNotification<'a>(&'a mut Notifications);

impl NextNotification<'_> {
    /// Blocks until there is a notification, at most `limit`. Then it returns `DeadlineExceeded`.
    pub fn wait(self, limit: Duration) -> Result<Notification> {
        wait(self, limit)?
    }
}

impl Future for NextNotification<'_> {
    type Output = Result<Notification>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll(context)
    }
}

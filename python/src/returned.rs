//! Items of a stream that were taken from it, and that nobody has got.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use multirail::Error;
use pyo3::prelude::*;

use crate::value::Value;

/// The items that a stream gives out again, before new ones: those of operations that were cancelled or dropped after they
/// had taken an item.
#[derive(Default)]
pub struct Returned(Mutex<Items>);

#[derive(Default)]
struct Items {
    objects: VecDeque<Py<PyAny>>,
    waiting: Vec<Waker>,
}

impl Returned {
    /// Takes the first item, for a caller that asks at once.
    pub fn pop(&self) -> Option<Py<PyAny>> {
        self.lock().objects.pop_front()
    }

    /// Gives an item back, and wakes the operations that wait for one.
    pub fn give_back(&self, object: Py<PyAny>) {
        let waiting = {
            let mut items = self.lock();
            items.objects.push_back(object);
            std::mem::take(&mut items.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }

    fn lock(&self) -> MutexGuard<'_, Items> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The next item: one that was given back, or else the one of `next`.
pub struct NextItem<F> {
    returned: Arc<Returned>,
    next: Pin<Box<F>>,
}

impl<F: Future<Output = Result<Value, Error>>> NextItem<F> {
    pub fn new(returned: &Arc<Returned>, next: F) -> Self {
        Self { returned: Arc::clone(returned), next: Box::pin(next) }
    }
}

impl<F: Future<Output = Result<Value, Error>>> Future for NextItem<F> {
    type Output = Result<Value, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        {
            let mut items = self.returned.lock();
            if let Some(object) = items.objects.pop_front() {
                drop(items);
                return Poll::Ready(Ok(Value::item(&self.returned, move |_| Ok(object))));
            }
            if !items.waiting.iter().any(|known| known.will_wake(context.waker())) {
                items.waiting.push(context.waker().clone());
            }
        }
        self.next.as_mut().poll(context)
    }
}

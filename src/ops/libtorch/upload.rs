//! Numbers from the program to a GPU.

use std::ffi::{CStr, c_char, c_int};
use std::ptr::null_mut;
use tch::{Device, Tensor};
use torch_sys::C_tensor;

unsafe extern "C" {
    fn autoresearch_upload(numbers: *const i64, count: i64, device: c_int, output: *mut *mut C_tensor)
    -> *const c_char;
}

/// `numbers` `[n]` on `device`, without waiting for what it still has to do.
pub fn upload(numbers: &[i64], device: Device) -> Tensor {
    let Device::Cuda(index) = device else { return Tensor::from_slice(numbers).to_device(device) };
    let mut output = null_mut();
    // SAFETY: the numbers live during the call, which copies them; on success it leaves a tensor that belongs to us.
    unsafe {
        let problem = autoresearch_upload(numbers.as_ptr(), numbers.len() as i64, index as c_int, &mut output);
        if !problem.is_null() {
            panic!("copying to {device:?}: {}", CStr::from_ptr(problem).to_string_lossy());
        }
        Tensor::from_ptr(output)
    }
}

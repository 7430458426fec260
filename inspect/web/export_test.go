package web

import "time"

// Looking reports whether the server is asked.
func (h *Handler) Looking() bool {
	h.sampler.mu.Lock()
	defer h.sampler.mu.Unlock()
	return h.sampler.stop != nil
}

// SetWriteBound sets how long a viewer has to take what is sent.
func (h *Handler) SetWriteBound(d time.Duration) { h.writeBound = d }

// Points returns how many moments the plots have.
func (h *Handler) Points() int {
	h.sampler.mu.Lock()
	defer h.sampler.mu.Unlock()
	return len(h.sampler.history)
}

// Lost returns how many losses the page knows.
func (h *Handler) Lost() uint64 {
	total, _, _ := h.sampler.losses.list()
	return total
}

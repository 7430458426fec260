package web

import (
	"errors"
	"net/http"
	"time"
)

// stream sends the events of the sampler, until the client goes, does not take
// what is sent, or the Handler is closed.
func (h *Handler) stream(w http.ResponseWriter, r *http.Request) {
	v, greeting, first, err := h.sampler.enter()
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	defer h.sampler.leave(v)
	c := http.NewResponseController(w)
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no") // of a proxy
	if err := c.Flush(); errors.Is(err, http.ErrNotSupported) {
		http.Error(w, "mysqllock: what wraps the page's http.ResponseWriter cannot flush a stream", http.StatusInternalServerError)
		return
	}
	send := func(m message) bool {
		// Where that is not supported, a client that does not read keeps its own
		// goroutine waiting, and nothing else.
		_ = c.SetWriteDeadline(time.Now().Add(h.writeBound))
		_, err := w.Write(m)
		if err == nil {
			err = c.Flush()
		}
		_ = c.SetWriteDeadline(time.Time{})
		return err == nil
	}
	greeting.Release, greeting.Window, greeting.Classes = h.options.AllowRelease, window.Milliseconds(), h.options.Class != nil
	greeting.Record = h.options.Record != ""
	for _, minutes := range ranges {
		greeting.Ranges = append(greeting.Ranges, int64(minutes)*time.Minute.Milliseconds())
	}
	if greeting.Release {
		greeting.Secret = h.secret
	}
	for _, m := range append([]message{newMessage("hello", greeting)}, first...) {
		if !send(m) {
			return
		}
	}
	for {
		select {
		case m := <-v:
			if !send(m) {
				return
			}
		case <-r.Context().Done():
			return
		case <-h.sampler.done:
			return
		}
	}
}

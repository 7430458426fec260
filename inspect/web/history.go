package web

import (
	"encoding/json"
	"net/http"
	"slices"
	"time"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/inspect/record"
)

const (
	// lastHour is how far the history of a lock goes back, and maxPast how many lines of it the page is sent.
	lastHour = time.Hour
	maxPast  = 200
)

// happened is a line of the history of a lock.
type happened struct {
	Time time.Time `json:"time"`
	Text string    `json:"text"`
	Bad  bool      `json:"bad,omitempty"`
}

// history answers with the last hour of a lock, the latest first: of the key in all strategies and slots, with the
// deadlocks of all keys, and when the recorder did not look.
func (h *Handler) history(w http.ResponseWriter, r *http.Request) {
	if h.options.Record == "" {
		http.NotFound(w, r)
		return
	}
	asked, from := r.URL.Query().Get("id"), time.Now().Add(-lastHour)
	var about *record.Event // a lock with the id
	var all []record.Event
	err := record.Read(h.options.Record, func(e record.Event) {
		if len(e.Name) > 0 && id(inspect.Lock{Strategy: e.Strategy, Namespace: e.Namespace, Name: string(e.Name)}) == asked {
			about = &e
		}
		if e.Time.After(from) && e.What != record.Looked && e.What != record.NotSeen {
			all = append(all, e)
		}
	})
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	out := []happened{}
	for _, e := range slices.Backward(all) {
		ofLock := about != nil && e.Namespace == about.Namespace && (e.Key == about.Key && e.Key != "" || string(e.Name) == string(about.Name))
		if len(e.Name) > 0 && !ofLock || len(out) == maxPast {
			continue
		}
		bad := e.What == record.Lost || e.What == record.Forced || e.What == record.Deadlocks || e.What == record.Failed
		out = append(out, happened{e.Time, printable(e.String()), bad})
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(out)
}

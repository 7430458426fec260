package handle

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
)

// name tells the key of a resource from the same one of another kind, or in another lock
// table, for all processes.
func (l *Locks) name(p strategy.Resource) string {
	if !p.Traits.Table {
		return p.Strategy + p.Row
	}
	return l.table.String() + p.Row
}

// held are the names, to l, of the resources that a caller has, without slots: others can give a
// slot back.
func (l *Locks) held(resources []strategy.Resource) (names []string) {
	for _, p := range resources {
		if p.Slots == 0 {
			names = append(names, l.name(p))
		}
	}
	return names
}

const (
	// circleAfter is for how long a caller waits before it looks for others, in other
	// processes, that wait for what it has, and circleEvery how often it does from then on.
	circleAfter, circleEvery = 3 * time.Second, time.Second
	// mostPairs is how many pairs of keys it does so for.
	mostPairs = 16
)

// watchCircles has one of two callers give way, if they are in different processes and
// each has what the other waits for. A caller whose wanted key comes after the one that
// it has shows that it waits, by a named lock of the server. A caller whose wanted key
// comes before looks for such a lock, and gives way if there is one. So it is always the
// same of the two, and a caller that waits for one that waits for nobody does not give
// way. end is called if this one is to.
func (l *Locks) watchCircles(ctx context.Context, held []string, wanted []strategy.Resource, end func(error)) {
	var show, look []string
	for _, has := range held {
		for _, p := range wanted {
			switch name := l.name(p); {
			case p.Slots > 0 || name == has || len(show)+len(look) >= mostPairs:
			case has < name:
				show = append(show, lockname.OfWait(l.namespace, has, name))
			default:
				look = append(look, lockname.OfWait(l.namespace, name, has))
			}
		}
	}
	if len(show)+len(look) == 0 {
		return
	}
	var shows []func()
	defer func() {
		for _, release := range shows {
			release()
		}
	}()
	tick := time.NewTimer(circleAfter)
	defer tick.Stop()
	for ; ; tick.Reset(circleEvery) {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		show = slices.DeleteFunc(show, func(name string) bool {
			release, ok := l.advisories.Show(ctx, name)
			if ok {
				shows = append(shows, release)
			}
			return ok
		})
		if len(look) > 0 {
			if other := l.shown(ctx, look); other != "" {
				end(queue.Deadlock(fmt.Sprintf("the holder of the key waits for a key that this caller holds,"+
					" as connection %s of its process says", other)))
				return
			}
		}
	}
}

// shown returns the id of a connection that has one of the named locks; "" if none has.
func (l *Locks) shown(ctx context.Context, names []string) string {
	ctx, cancel := server.Within(ctx, circleEvery)
	defer cancel()
	c, err := l.Control.Acquire(ctx)
	if err != nil {
		return ""
	}
	defer c.Release()
	rows, err := server.Query(ctx, c.Conn, "SELECT COALESCE(IS_USED_LOCK('"+strings.Join(names, "'), IS_USED_LOCK('")+"'))")
	if err != nil || len(rows) != 1 {
		return ""
	}
	return rows[0][0]
}

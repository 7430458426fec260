// Package grpclock tells gRPC clients what became of a lock, with the status Unavailable or
// Aborted and the time after which to try again.
//
//	grpc.NewServer(grpc.UnaryInterceptor(grpclock.Unary), grpc.StreamInterceptor(grpclock.Stream))
package grpclock

import (
	"context"
	"errors"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/mysqllock/mysqllock"
)

// retryAfter is what RetryInfo says.
const retryAfter = time.Second

// Error returns the status for an error of a lock, with RetryInfo in its details, and every
// other error as it is.
//
//   - Unavailable: another caller has the key (ErrLocked, ErrTimeout), or this one could not be
//     served (ErrExhausted, ErrNoAnswer). Nothing was run.
//   - Aborted: the work was rolled back, and may be done again from its beginning
//     (ErrDeadlock, ErrConflict, ErrLost), if the handler had committed nothing before: one with several
//     transactions, as in a Do under a lease or an advisory lock, returns another error for a later one.
//
// An ErrLost whose outcome is unknown, as after a connection that broke in COMMIT, stays as it
// is, so does one of a lease that was gone at its end, when all was committed ([mysqllock.Error].Op is
// "release"), and so does what a mistake in the program brings about (ErrUnsafe, ErrStaleRead, a bad
// hint). The status does not tell the client who has the lock: that is in err, for the log.
func Error(err error) error {
	code, ok := Code(err)
	if !ok {
		return err
	}
	s := status.New(code, map[codes.Code]string{codes.Unavailable: "busy", codes.Aborted: "aborted"}[code])
	if detailed, failed := s.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(retryAfter)}); failed == nil {
		s = detailed
	}
	return s.Err()
}

// Code is the code of [Error]; ok is false for errors that stay as they are.
func Code(err error) (code codes.Code, ok bool) {
	var e *mysqllock.Error
	switch {
	case errors.Is(err, mysqllock.ErrLost):
		if errors.As(err, &e) && (e.Op == "commit" || e.Op == "release") {
			return codes.OK, false
		}
		return codes.Aborted, true
	case errors.Is(err, mysqllock.ErrDeadlock), errors.Is(err, mysqllock.ErrConflict):
		return codes.Aborted, true
	case errors.Is(err, mysqllock.ErrLocked), errors.Is(err, mysqllock.ErrTimeout),
		errors.Is(err, mysqllock.ErrExhausted), errors.Is(err, mysqllock.ErrNoAnswer):
		return codes.Unavailable, true
	}
	return codes.OK, false
}

// Unary answers calls with [Error].
func Unary(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	answer, err := handler(ctx, request)
	return answer, Error(err)
}

// Stream answers streams with [Error].
func Stream(server any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	return Error(handler(server, stream))
}
